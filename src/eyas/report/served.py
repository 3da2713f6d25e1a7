"""Sections of the page on a served draft: what was measured at each concurrency, and how many tokens to draft.

Everything comes from verdict.json; a run without served figures has none of these sections.
"""

from typing import Any

from eyas.report import pieces
from eyas.report.data import Run, mapping, number, rows
from eyas.report.pieces import amount, decimal

Points = list[tuple[float, float, float | None, float | None]]
"""Concurrency, speed-up, low and high end of its interval."""


def launch(run: Run) -> str:
    """The command that serves the target with the draft, and up to where it should."""
    command = run.verdict.get("launch")
    if not isinstance(command, str) or not command:
        return ""
    deploy = mapping(run.verdict.get("deploy"))
    limit, answer = number(deploy.get("max_concurrency")), deploy.get("verdict")
    best = ", ".join(
        f"{amount(number(row.get('draft_tokens')))} at {amount(number(row.get('concurrency')))}"
        for row in rows(mapping(run.verdict.get("sweep")).get("best"))
    )
    said = {
        "yes": f"It pays at every concurrency that was measured, up to {amount(limit)}.",
        "up_to": f"It pays for up to {amount(limit)} requests at a time; above that serve without the draft.",
    }.get(str(answer), "So it was measured; the verdict is against serving it.")
    more = f" Best number of draft tokens, by requests at a time: {best}." if best else ""
    return pieces.section("Launch command", pieces.pre(command) + pieces.note(said + more))


def speedups(run: Run) -> str:
    """Throughput with and without the draft, and what it takes to pay."""
    lines, series = [], dict[str, Points]()
    for row in rows(run.verdict.get("bench")):
        plain, draft = mapping(row.get("plain")), mapping(row.get("draft"))
        ratio, name = mapping(row.get("ratio")), _workload(row)
        lines.append(
            (
                name,
                amount(number(row.get("concurrency"))),
                amount(number(plain.get("tokens_per_second"))),
                amount(number(draft.get("tokens_per_second"))),
                decimal(ratio.get("ratio")),
                pieces.interval(ratio),
                decimal(row.get("accept_length")),
                decimal(row.get("break_even")),
            )
        )
        series.setdefault(name, []).extend(_point(row, ratio))
    heads = (
        "workload",
        "requests",
        "plain tok/s",
        "draft tok/s",
        "speed-up",
        "interval",
        "accept length",
        "break-even",
    )
    table = pieces.table(heads, lines, numbers=range(1, 8))
    if not table:
        return ""
    note = pieces.note(
        "Requests: under way at once. Tok/s: of all together, the median of the rounds. Break-even: the accept length "
        "from which a draft pays on this server, a verify round's time over a plain token's. Looping answers count in "
        "all of these."
    )
    return pieces.section("Speed-up by requests at a time", _drawn(series) + table + note)


def latencies(run: Run) -> str:
    """Time to the first token and between tokens, with and without the draft."""
    lines = []
    for row in rows(run.verdict.get("bench")):
        for side in ("plain", "draft"):
            first, between = (mapping(mapping(row.get(side)).get(what)) for what in ("first_token", "inter_token"))
            times = (pieces.milliseconds(part.get(p)) for part in (first, between) for p in ("p50", "p99"))
            lines.append((_workload(row), amount(number(row.get("concurrency"))), side, *times))
    heads = ("workload", "requests", "", "first token p50", "p99", "between tokens p50", "p99")
    table = pieces.table(heads, lines, numbers=(1, 3, 4, 5, 6))
    note = pieces.note(
        "Milliseconds. Tokens of one verify step arrive together: the time between two pieces is spread over the "
        "tokens that came with the second."
    )
    return pieces.section("Latency", table + note) if table else ""


def sweep(run: Run) -> str:
    """Numbers of draft tokens: predicted, and measured where that was worth a load."""
    found = mapping(run.verdict.get("sweep"))
    lines, series = [], dict[str, Points]()
    for row in rows(found.get("rows")):
        predicted, measured = mapping(row.get("predicted")), mapping(row.get("measured"))
        tokens = amount(number(row.get("draft_tokens")))
        lines.append(
            (
                amount(number(row.get("concurrency"))),
                tokens,
                decimal(predicted.get("accept_length")),
                decimal(predicted.get("speedup")),
                decimal(measured.get("ratio")),
                pieces.interval(measured),
                str(row.get("reason") or ""),
            )
        )
        if points := _point(row, measured):
            series.setdefault(f"{tokens} draft tokens", []).extend(points)
    heads = ("requests", "draft tokens", "accept length", "predicted", "measured", "interval", "")
    table = pieces.table(heads, lines, numbers=(0, 1, 2, 3, 4, 5))
    if not table:
        return ""
    crossover, loads = number(found.get("crossover")), number(found.get("loads"))
    said = f"The sweep took {amount(loads)} server load{'' if loads == 1 else 's'}."
    if crossover is not None:
        said += f" Above {amount(crossover)} request{'' if crossover == 1 else 's'} at a time plain decoding wins."
    return pieces.section("Number of draft tokens", _drawn(series) + table + pieces.note(said))


def _workload(row: dict[str, Any]) -> str:
    heat = number(row.get("temperature"))
    return str(row.get("workload", "–")) + (f", temperature {heat:g}" if heat else "")


def _point(row: dict[str, Any], ratio: dict[str, Any]) -> Points:
    at, middle = number(row.get("concurrency")), number(ratio.get("ratio"))
    if at is None or at <= 0 or middle is None:
        return []
    return [(at, middle, number(ratio.get("low")), number(ratio.get("high")))]


def _drawn(series: dict[str, Points]) -> str:
    shown = {name: sorted(points, key=lambda point: point[:2]) for name, points in series.items() if points}
    return pieces.plot(lambda plots: plots.speedups(shown)) if shown else ""
