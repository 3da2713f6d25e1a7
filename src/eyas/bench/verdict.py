"""The verdict: does this draft pay, and may the figures be believed?

Last step of a run. It measures nothing; it reads what replay, decode, train, vocabulary and capture found, and says yes
or no in sentences. `reasons` begin with those that decided; the rest tell how far the figures reach.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from eyas.bench import cost
from eyas.bench.parity import ABSOLUTE, accept_length, by_position, count, differs, number, positions
from eyas.files import read_json, write_json
from eyas.progress import Progress
from eyas.spec import StepSpec

NEEDS = ("replay", "decode", "train", "vocabulary", "capture")
IF_THERE = ("again", "sweep", "candidates", "break-even")


def run(spec: StepSpec, out: Path, progress: Progress) -> dict[str, Any]:
    """Step entry: read the five results, decide, write `verdict.json`."""
    progress.milestone("weighing the figures")
    found = {name: read_json(spec.inputs[name] / "result.json") for name in NEEDS if name in spec.inputs}
    more = {name: read_json(spec.inputs[name] / "result.json") for name in IF_THERE if name in spec.inputs}
    if "decode" in found and (diagnosis := _diagnosis(spec, found["decode"], progress)):
        more["diagnosis"] = diagnosis
    verdict = decide(**found, more=more) if "decode" in found else undecided(**found, more=more)
    write_json(out / "verdict.json", verdict)
    return verdict


def _diagnosis(spec: StepSpec, decode: dict[str, Any], progress: Progress) -> dict[str, Any] | None:
    """Why the draft is not accepted as predicted, by experiment; None where it is."""
    if not differs(decode):
        return None
    from eyas.bench import cases  # imports torch, which a verdict needs only here

    return cases.of_run(spec, decode, progress)


def decide(
    replay: dict[str, Any],
    decode: dict[str, Any],
    train: dict[str, Any],
    vocabulary: dict[str, Any],
    capture: dict[str, Any],
    more: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any]:
    """What verdict.json holds, from the results of the five steps and of those that a run may have besides
    (docs/seams.md)."""
    predicted = _dict(decode.get("predicted"))
    bench = _dict(more.get("again")).get("bench") or decode.get("bench") or []
    speedup = _speedups(bench) or [{"concurrency": 1, **_interval(_dict(decode.get("speedup")))}]
    lossless = decode.get("lossless") is True
    against = _distrust(predicted, decode, lossless) + _disturbed(speedup, _dict(more.get("again")).get("drift") or {})
    deploy, pace = _deploy(speedup, trusted=not against)
    return {
        "accept_length": {
            "predicted": accept_length(predicted),
            "served": accept_length(decode),
            "draft_tokens": count(decode, "draft_tokens"),
            "by_position": by_position(predicted, decode),
            "looping": {
                "rows": count(_dict(decode.get("looping")), "rows"),
                "predicted": number(_dict(predicted.get("looping")).get("accept_length")),
                "served": number(_dict(decode.get("looping")).get("accept_length")),
            },
        },
        "speedup": speedup,
        "lossless": lossless,
        "deploy": deploy,
        "reasons": [
            *against,
            *_diagnosed(more),
            pace,
            *_pays(speedup),
            *_priced(more),
            *_elsewhere(bench),
            *_swept(_dict(more.get("sweep"))),
            *_others(more),
            *_reach(replay, decode, lossless),
            *_training(train, vocabulary, capture),
        ],
        "bench": [
            {**row, "break_even": cost.break_even(row), "accept_length": cost.accept_length(row)} for row in bench
        ],
        "launch": decode.get("launch"),
        **{name: more[name] for name in ("sweep", "candidates", "diagnosis") if name in more},
    }


def undecided(
    replay: dict[str, Any],
    train: dict[str, Any],
    vocabulary: dict[str, Any],
    capture: dict[str, Any],
    more: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any]:
    """What verdict.json holds where the draft was not served, since eyas does not start the server: a prediction."""
    predicted = accept_length(replay)
    looping = {
        "rows": count(_dict(replay.get("looping")), "rows"),
        "predicted": number(_dict(replay.get("looping")).get("accept_length")),
        "served": None,
    }
    return {
        "accept_length": {
            "predicted": predicted,
            "served": None,
            "draft_tokens": count(replay, "draft_tokens"),
            "by_position": by_position(replay, {}),
            "looping": looping,
        },
        "speedup": [],
        "lossless": None,
        "deploy": {"verdict": "no", "max_concurrency": None},
        "reasons": [
            "The draft was not served, so its speed is not known: server.url names a server that eyas does not start. "
            "Start it with the draft (the draft's own page says how) and measure, or let eyas launch it.",
            f"Replay on all held-out answers predicts an accept length of {_say(predicted)}, "
            f"over {_plural(count(replay, 'rounds'), 'step')}.",
            *_others(more),
            *_training(train, vocabulary, capture),
        ],
        "bench": [],
        "launch": None,
    }


def _distrust(predicted: dict[str, Any], decode: dict[str, Any], lossless: bool) -> list[str]:
    """Sentences that speak against believing the figures at all; none if they may be believed."""
    reasons = []
    if not lossless:
        wrong = count(decode, "mismatches")
        reasons.append(
            f"Decoding with the draft is not lossless: {wrong} of {_plural(count(decode, 'prompts'), 'answer')} "
            "differ from the target's own. A drafter may only change the speed."
        )
    empty = [what for what, part in (("predicted", predicted), ("decoded", decode)) if not count(part, "rounds")]
    if empty:
        return [
            *reasons,
            f"Nothing was counted: the {' and the '.join(empty)} accept length rests on no verify step outside looping "
            "rows. Use more or other held-out prompts (prompts.heldout).",
        ]
    for what, part in (("predicted", predicted), ("decoded", decode)):
        reasons += _contradictions(what, part)
    return reasons + differs(decode)


def _contradictions(what: str, part: dict[str, Any]) -> list[str]:
    """An accept length has one definition; a figure that its own counts do not give is not that."""
    counted, said = accept_length(part), number(part.get("accept_length"))
    joint = sum(count(row, "accepted") for row in positions(part))
    if said is None or counted is None or abs(said - counted) > ABSOLUTE / 2:
        return [f"The {what} accept length is given as {_say(said)}, but its counts make it {_say(counted)}."]
    if joint != count(part, "accepted"):
        return [
            f"The {what} counts contradict each other: {count(part, 'accepted')} drafts accepted in all, "
            f"{joint} added up by position."
        ]
    return []


def _deciding(bench: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows that decide: of the first workload, greedy; where nothing is, at the first temperature."""
    first = next((row for row in bench if row["temperature"] == 0), bench[0] if bench else {})
    return [row for row in bench if all(row[key] == first[key] for key in ("workload", "temperature"))]


def _speedups(bench: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The figures that decide, by concurrency."""
    return [
        {
            "concurrency": row["concurrency"],
            **_interval(row["ratio"]),
            "break_even": cost.break_even(row),
            "accept_length": cost.accept_length(row),
        }
        for row in _deciding(bench)
    ]


def _disturbed(speedup: list[dict[str, Any]], drift: dict[str, dict[str, Any]]) -> list[str]:
    """Where a speed-up cannot be what it is said to be.

    A verify step takes at least as long as a plain one, so no draft is faster than its accept length; and what two
    loads of the same plain server differ by is no gain.
    """
    reasons = []
    for row in speedup:
        at, length, low, ratio = row["concurrency"], number(row.get("accept_length")), row["low"], row["ratio"]
        if length is not None and low is not None and low > length:
            reasons.append(
                f"A speed-up of {ratio:.2f} with {_plural(at, 'request')} at a time cannot be: a verify step costs at "
                f"least a plain step, so an accept length of {length:.2f} allows no more than that. The baseline was "
                "disturbed: measure again on a quiet machine."
            )
        moved = number(_dict(drift.get(str(at))).get("ratio"))
        if moved and ratio and ratio > 1 and abs(math.log(moved)) > math.log(ratio):
            reasons.append(
                f"The plain server itself changed by {moved:.2f} times between its two loads, with "
                f"{_plural(at, 'request')} at a time, more than the draft gains ({ratio:.2f}): measure again."
            )
    return reasons


def _pays(speedup: list[dict[str, Any]]) -> list[str]:
    """Accept lengths at which a draft begins to pay, beside those that were reached."""
    return [
        f"With {_plural(row['concurrency'], 'request')} at a time a draft must reach {row['break_even']:.2f} tokens a "
        f"step to pay on this server; this one reaches {_say(row['accept_length'])}."
        for row in speedup
        if row.get("break_even")
    ]


def _priced(more: Mapping[str, Any]) -> list[str]:
    """What a draft had to reach by the costs of a random one, before any was trained."""
    rows = [row for row in _dict(more.get("break-even")).get("rows") or [] if row.get("break_even")]
    said = ", ".join(f"{row['break_even']:.2f} with {_plural(row['concurrency'], 'request')} at a time" for row in rows)
    return [f"Before training a draft of random weights set what a draft must reach to pay: {said}."] if said else []


def _elsewhere(bench: list[dict[str, Any]]) -> list[str]:
    """The figures that do not decide: other workloads, other temperatures."""
    deciding = _deciding(bench)
    return [
        f"On {row['workload']} at temperature {row['temperature']:g}, {_plural(row['concurrency'], 'request')} at a "
        f"time: {_say(number(row['ratio']['ratio']))} times as fast, accept length {_say(cost.accept_length(row))}."
        for row in bench
        if row not in deciding
    ]


def _swept(sweep: dict[str, Any]) -> list[str]:
    best = [
        f"{row['draft_tokens']} with {_plural(row['concurrency'], 'request')} at a time ({row['speedup']:.2f} times)"
        for row in sweep.get("best") or []
    ]
    reasons = [f"The best number of draft tokens is {', '.join(best)}."] if best else []
    if crossover := sweep.get("crossover"):
        reasons.append(f"Above {_plural(crossover, 'request')} at a time plain decoding wins.")
    return reasons


def _diagnosed(more: Mapping[str, Any]) -> list[str]:
    """What the experiments say of acceptance that is not as predicted."""
    found = _dict(more.get("diagnosis"))
    remedy = found.get("remedy")
    return [f"{found['sentence']}{f' To mend it: {remedy}.' if remedy else ''}"] if found else []


def _others(more: Mapping[str, Any]) -> list[str]:
    """What was found of existing drafts."""
    return [
        f"The existing draft {one['folder']} "
        + (f"cannot be used: {one['problem']}" if one.get("problem") else f"reaches {_say(one['accept_length'])}.")
        for one in _dict(more.get("candidates")).get("candidates") or []
    ]


def _deploy(speedup: list[dict[str, Any]], trusted: bool) -> tuple[dict[str, Any], str]:
    """The decision, and the sentence on speed that goes with it.

    A concurrency pays if the whole interval of its speed-up lies above 1, and so does every smaller one measured.
    """
    pays = 0
    ordered = sorted(speedup, key=lambda row: int(row["concurrency"]))
    for row in ordered:
        if None in (row["ratio"], row["low"], row["high"]) or row["low"] <= 1:
            break
        pays = int(row["concurrency"])
    sentence = "; ".join(_pace(row) for row in ordered) + "."
    if not trusted or not pays:
        return {"verdict": "no", "max_concurrency": None}, sentence
    everywhere = pays == ordered[-1]["concurrency"]
    return {"verdict": "yes" if everywhere else "up_to", "max_concurrency": pays}, sentence


def _pace(row: dict[str, Any]) -> str:
    at = "With one request at a time" if row["concurrency"] == 1 else f"With {row['concurrency']} requests at a time"
    ratio, low, high = row["ratio"], row["low"], row["high"]
    if ratio is None or low is None or high is None:
        return f"{at} no speed-up could be measured"
    interval = f"interval {low:.2f} to {high:.2f}"
    if low > 1:
        return f"{at} decoding with the draft is {ratio:.2f} times as fast as without ({interval})"
    if high < 1:
        return f"{at} decoding with the draft is slower than without: {ratio:.2f} times its speed ({interval})"
    return f"{at} the draft is not proven faster: {ratio:.2f} times the speed, but the {interval} does not lie above 1"


def _reach(replay: dict[str, Any], decode: dict[str, Any], lossless: bool) -> list[str]:
    """What was measured, on how much, and what it does not tell."""
    reasons = []
    prompts = _plural(count(decode, "prompts"), "held-out prompt")
    if lossless:
        ties = count(decode, "near_ties")
        but = (
            f", save {_plural(ties, 'answer')} that took the other side of a tie between two tokens, as "
            f"{decode.get('dtype')} does"
            if ties
            else ""
        )
        reasons.append(f"Decoding with the draft is lossless: on {prompts} every answer equals the target's own{but}.")
    length = accept_length(decode)
    if length is not None:
        reasons.append(
            f"Decoded accept length is {length:.2f} tokens a verify step, the bonus token included, with up to "
            f"{_plural(count(decode, 'draft_tokens'), 'draft token')} a step, over "
            f"{_plural(count(decode, 'rounds'), 'step')} on {prompts}."
        )
    rates = [
        f"{count(row, 'accepted') / count(row, 'reached'):.0%} at position {count(row, 'position')}"
        for row in positions(decode)
        if count(row, "reached")
    ]
    if rates:
        reasons.append(f"Of the drafts that were reached, the target accepted {', '.join(rates)}.")
    everywhere = accept_length(replay)
    if everywhere is not None:
        reasons.append(
            f"Replay on all held-out answers predicts {everywhere:.2f}, "
            f"over {_plural(count(replay, 'rounds'), 'step')}."
        )
    looping = _dict(decode.get("looping"))
    rows, length = count(looping, "rows"), number(looping.get("accept_length"))
    if rows:
        reasons.append(
            f"{_plural(rows, 'answer')} that repeat themselves flatter any drafter and are left out of these figures; "
            f"alone they reach {_say(length)}."
        )
    warm = [(one["temperature"], accept_length(one)) for one in decode.get("sampled") or []]
    if warm:
        said = ", ".join(f"{_say(length)} at temperature {heat:g}" for heat, length in warm)
        reasons.append(f"Sampled answers, which keep the target's own distribution, reach {said}.")
    timed = count(decode, "timed_tokens")
    engine = f"on {decode['engine']}" if isinstance(decode.get("engine"), str) else "in-process"
    batches = "" if decode.get("bench") else "about batches "
    reasons.append(
        f"The speed-up was measured {engine}"
        f"{f', on answers of up to {timed} tokens' if timed else ''}. It says nothing about another engine, {batches}"
        "or about other hardware: measure there before you deploy."
    )
    return reasons


def _training(train: dict[str, Any], vocabulary: dict[str, Any], capture: dict[str, Any]) -> list[str]:
    """What the draft was made from."""
    reasons = []
    coverage = number(vocabulary.get("coverage"))
    if coverage is not None:
        reasons.append(
            f"The draft vocabulary of {_plural(count(vocabulary, 'size'), 'token')} holds {coverage:.2%} of the "
            "tokens in the training answers. Any other token is a miss, so acceptance at a position stays below about "
            "that share."
        )
    samples, quarantined = count(capture, "samples"), count(capture, "quarantined")
    reasons.append(
        f"{_plural(quarantined, 'captured sample')} failed a proof and {'was' if quarantined == 1 else 'were'} "
        f"quarantined; {_plural(samples, 'sample')} were kept."
        if quarantined
        else f"None of {_plural(samples, 'captured sample')} failed a proof."
    )
    reasons.append(
        f"The draft was trained for {_plural(count(train, 'steps'), 'step')} on "
        f"{_plural(count(train, 'tokens'), 'token')}."
    )
    return reasons


def _interval(speedup: dict[str, Any]) -> dict[str, float | None]:
    return {name: number(speedup.get(name)) for name in ("ratio", "low", "high")}


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _say(value: float | None) -> str:
    return "nothing" if value is None else f"{value:.2f}"
