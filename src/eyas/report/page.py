"""The page: a run folder becomes `report.html`, one file that needs nothing else.

Every section is a function from the run to HTML. Where its data is missing it is one grey sentence, so that a run that
failed or is still going gives a page too.
"""

from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from eyas.files import write_atomic
from eyas.report import pieces, served
from eyas.report.data import Run, Step, curve, mapping, number, read, rows
from eyas.ui.text import duration

OVERLAP = ("took", "one_after_another", "end", "low", "high")


def build(run_folder: Path) -> Path:
    """Write `report.html` into the run folder, whatever state the run is in; return its path."""
    path = run_folder / "report.html"
    write_atomic(path, render(read(run_folder)))
    return path


def render(run: Run) -> str:
    """The whole page."""
    parts = [
        _errors(run),
        _headline(run),
        _figures(run),
        served.launch(run),
        served.speedups(run),
        served.latencies(run),
        served.sweep(run),
        pieces.pair(_acceptance(run), _counts(run)),
        pieces.pair(_loss(run), _training(run)),
        pieces.pair(_rates(run), _timeline(run)),
        _steps(run),
        _checks(run),
        _proofs(run),
        _configuration(run),
        _versions(run),
    ]
    style = resources.files("eyas.report").joinpath("style.css").read_text(encoding="utf-8")
    body = "\n".join(part for part in parts if part)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{pieces.escape(run.name)} · eyas</title>
<style>
{style}</style>
</head>
<body>
{body}
</body>
</html>
"""


# Sections, in the order of the page


def _errors(run: Run) -> str:
    return "\n".join(
        f'<p class="error"><strong>The step {pieces.escape(step.name)} failed.</strong> '
        f"{pieces.escape(step.error or 'It left no error line; see its log.txt.')}</p>"
        for step in run.steps
        if step.failed
    )


def _headline(run: Run) -> str:
    name = f'<p class="run">eyas run {pieces.escape(run.name)}</p>'
    if not run.verdict:
        return f"{name}\n<h1>No verdict yet</h1>\n" + pieces.grey("The last step has not finished: nothing is proven.")
    deploy = mapping(run.verdict.get("deploy"))
    limit = number(deploy.get("max_concurrency"))
    requests = "one request" if limit == 1 else f"up to {pieces.amount(limit)} requests"
    kind, words = {
        "yes": ("yes", f"Deploy this drafter: it pays, measured with {requests} at a time"),
        "up_to": ("yes", f"Deploy this drafter for {requests} at a time, no more"),
    }.get(str(deploy.get("verdict")), ("no", "Do not deploy this drafter"))
    reasons = run.verdict.get("reasons")
    said = [str(reason) for reason in reasons] if isinstance(reasons, list) else []
    first = f"<p>{pieces.escape(said[0])}</p>" if said else ""
    rest = "".join(f"<li>{pieces.escape(reason)}</li>" for reason in said[1:])
    return f'{name}\n<h1 class="{kind}">{words}</h1>\n{first}' + (f'\n<ul class="reasons">{rest}</ul>' if rest else "")


def _figures(run: Run) -> str:
    if not run.verdict:
        return pieces.section("Key figures", pieces.grey("There are no key figures before the verdict."))
    length = mapping(run.verdict.get("accept_length"))
    cards = [
        (
            "Accept length, decoded",
            pieces.decimal(length.get("served")),
            "tokens a verify step, the bonus token included",
        ),
        ("Accept length, predicted", pieces.decimal(length.get("predicted")), "by replay, on the same prompts"),
    ]
    for row in rows(run.verdict.get("speedup")):
        limit = number(row.get("concurrency"))
        at = "one request at a time" if limit == 1 else f"{pieces.amount(limit)} requests at a time"
        low, high = pieces.decimal(row.get("low")), pieces.decimal(row.get("high"))
        ratio = number(row.get("ratio"))
        cards.append(("Speed-up", "–" if ratio is None else f"{ratio:.2f}×", f"interval {low} to {high}, {at}"))
    if run.verdict.get("lossless") is True:
        cards.append(("Lossless", "yes", "answers equal the target's own"))
    elif mapping(run.verdict.get("accept_length")) and run.verdict.get("lossless", "") is None:
        cards.append(("Lossless", "–", "the draft was not served"))
    else:
        cards.append(("Lossless", "no", "answers differ from the target's own"))
    cards.append(_time_to_verdict(run))
    looping = mapping(length.get("looping"))
    if number(looping.get("rows")):
        count = pieces.amount(number(looping.get("rows")))
        note = f"decoded; {pieces.decimal(looping.get('predicted'))} predicted; {count} rows, left out"
        cards.append(("Looping rows alone", pieces.decimal(looping.get("served")), note))
    items = "".join(
        f'<div><dt>{name}</dt><dd class="value">{value}</dd><dd class="note">{note}</dd></div>'
        for name, value, note in (map(pieces.escape, card) for card in cards)
    )
    return f'<dl class="figures">{items}</dl>'


def _time_to_verdict(run: Run) -> tuple[str, str, str]:
    """The headline figure. Reused steps count with the time that they took when they worked."""
    good = mapping(run.verdict.get("deploy")).get("verdict") in ("yes", "up_to")
    name = "Time to a verified drafter" if good else "Time to this verdict"
    spans = [step.span for step in run.steps if step.span and not step.reused]
    worked = max(end for _, end in spans) - min(start for start, _ in spans) if spans else 0.0
    reused = sum(step.seconds or 0.0 for step in run.steps if step.reused)
    count = sum(step.reused for step in run.steps)
    if not worked and not reused:
        return name, "–", "no timeline was written"
    note = "from the first step on"
    if count:
        note = f"{duration(reused)} of it by {count} reused step{'' if count == 1 else 's'}"
    return name, duration(worked + reused), note


def _positions(run: Run) -> list[dict[str, Any]]:
    return rows(mapping(run.verdict.get("accept_length")).get("by_position"))


def _acceptance(run: Run) -> str:
    title, positions = "Acceptance by position", _positions(run)
    if not positions:
        return pieces.section(title, pieces.grey("Acceptance by position is known after the verdict."))
    rates = {
        name: [pieces.rate(row.get(accepted), of) for row, of in zip(positions, totals, strict=True)]
        for name, accepted, totals in (
            ("predicted", "accepted_predicted", [row.get("reached_predicted") for row in positions]),
            ("decoded", "accepted_served", [row.get("reached") for row in positions]),
            ("predicted joint", "accepted_predicted", [positions[0].get("reached_predicted")] * len(positions)),
            ("decoded joint", "accepted_served", [positions[0].get("reached")] * len(positions)),
        )
    }
    places = [int(number(row.get("position")) or 0) for row in positions]
    return pieces.section(title, pieces.plot(lambda plots: plots.acceptance(places, rates)))


def _counts(run: Run) -> str:
    positions = _positions(run)
    if not positions:
        return ""
    lines = []
    for row in positions:
        for name, reached, accepted in (
            ("predicted", "reached_predicted", "accepted_predicted"),
            ("decoded", "reached", "accepted_served"),
        ):
            counts = (pieces.amount(number(row.get(reached))), pieces.amount(number(row.get(accepted))))
            rate = pieces.rate(row.get(accepted), row.get(reached))
            joint = pieces.rate(row.get(accepted), positions[0].get(reached))
            place = f"{pieces.amount(number(row.get('position')))} {name}"
            lines.append((place, *counts, pieces.percent(rate), pieces.percent(joint)))
    heads = ("position", "reached", "accepted", "rate", "joint")
    note = (
        '<p class="note">Rate: the share that the target accepted of the drafts that it reached at this position. '
        "Joint: the share of all verify steps that accepted this far.</p>"
    )
    return pieces.section("Counts", pieces.table(heads, lines, numbers=(1, 2, 3, 4)) + note)


def _metrics(run: Run) -> list[dict[str, Any]]:
    step = run.step("train")
    return step.metrics if step else []


def _loss(run: Run) -> str:
    tokens, values = curve(_metrics(run), "tokens", "loss")
    drawn = pieces.plot(lambda plots: plots.loss(tokens, values)) if tokens else pieces.grey("No loss was recorded.")
    return pieces.section("Loss over training", drawn)


def _training(run: Run) -> str:
    steps, values = curve(_metrics(run), "step", "accept_length")
    drawn = (
        pieces.plot(lambda plots: plots.length(steps, values)) if steps else pieces.grey("No evaluation was recorded.")
    )
    return pieces.section("Held-out accept length over training", drawn)


def _rates(run: Run) -> str:
    curves: list[tuple[list[float], list[float]]] = []
    while len(curves) < 4 and (points := curve(_metrics(run), "step", f"accept_{len(curves) + 1}"))[0]:
        curves.append(points)
    title = "Held-out acceptance by position over training"
    return pieces.section(title, pieces.plot(lambda plots: plots.rates(curves))) if curves else ""


def _timeline(run: Run) -> str:
    bars = [
        (step.name, *(step.span or (0.0, 0.0)), step.reused, step.failed)
        for step in run.steps
        if step.span or step.reused
    ]
    if not bars:
        return pieces.section("Timeline", pieces.grey("There is no timeline here."))
    return pieces.section("Timeline", pieces.plot(lambda plots: plots.timeline(bars)) + _overlap(run))


def _overlap(run: Run) -> str:
    """What the run took, against what was expected and against one after another."""
    took, whole, end, low, high = (number(run.overlap.get(key)) for key in OVERLAP)
    if took is None or whole is None:
        return ""
    text = f"It took {duration(took)}; one after another, the same would have taken {duration(whole)}."
    if end is not None and low is not None and high is not None:
        text += f" Expected were {duration(end)} ({duration(low)} to {duration(high)})."
    return pieces.grey(text)


def _proofs(run: Run) -> str:
    step = run.step("capture")
    proofs = mapping(step.result.get("proofs")) if step else {}
    lines = []
    for name, proof in proofs.items():
        checked, failed = (pieces.amount(number(mapping(proof).get(count))) for count in ("checked", "failed"))
        lines.append((name, checked, failed, pieces.value(mapping(proof).get("worst"))))
    table = pieces.table(("proof", "checked", "failed", "worst"), lines, numbers=(1, 2, 3))
    if not table:
        return pieces.section("Proofs of the capture", pieces.grey("There is no finished capture here."))
    return pieces.section("Proofs of the capture", table + _split(mapping(step.result) if step else {}))


def _split(capture: Mapping[str, Any]) -> str:
    """Where the time of a served capture went."""
    seconds = {name: number(value) for name, value in mapping(capture.get("seconds")).items()}
    rate = number(capture.get("tokens_per_second"))
    if not seconds or rate is None:
        return ""
    server, proofs, write, again = (duration(seconds.get(name)) for name in ("server", "proofs", "write", "recapture"))
    return pieces.grey(
        f"{pieces.amount(number(capture.get('samples')))} samples, {pieces.amount(rate)} tokens/s from first request "
        f"to last reply ({server}). Meanwhile, summed over threads: proofs {proofs}, writing {write}. A share captured "
        f"again, alone: {again}."
    )


def _checks(run: Run) -> str:
    """What the tiny twin and the doctor found."""
    lines = [
        (name, str(check.get("name")), _outcome(check.get("passed")), str(check.get("detail", "")))
        for name in ("twin", "doctor")
        if (step := run.step(name))
        for check in rows(step.result.get("checks"))
    ]
    table = pieces.table(("by", "check", "", "seen"), lines)
    return pieces.section("Checks of the server", table) if table else ""


def _outcome(passed: object) -> str:
    return "not tried" if passed is None else "passed" if passed is True else "failed"


def _steps(run: Run) -> str:
    lines = [(step.name, step.state, duration(step.seconds), *_work(step), step.digest[:12]) for step in run.steps]
    heads = ("step", "state", "time", "work", "rate", "digest")
    return pieces.section("Steps", pieces.table(heads, lines, numbers=(2, 3, 4)) or pieces.grey("No step has begun."))


def _work(step: Step) -> tuple[str, str]:
    """Work done in the step's longest stretch, and its rate."""
    if step.phase is None:
        return "–", "–"
    done, total, unit = step.phase.done, step.phase.total, step.phase.unit
    work = (
        f"{pieces.amount(done)} {unit}" if done >= total else f"{pieces.amount(done)} of {pieces.amount(total)} {unit}"
    )
    return work, f"{pieces.amount(step.phase.rate)} {unit}/s" if step.phase.rate else "–"


def _configuration(run: Run) -> str:
    return pieces.section(
        "Configuration", pieces.pre(run.config) if run.config else pieces.grey("There is no run.yaml here.")
    )


def _versions(run: Run) -> str:
    table = pieces.table(("what", "version"), run.versions.items())
    return pieces.section("Versions", table or pieces.grey("There is no versions.json here."))
