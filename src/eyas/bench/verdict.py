"""The verdict: does this draft pay, and may the figures be believed?

Last step of a run. It measures nothing; it reads what replay, decode, train, vocabulary and capture found, and says yes
or no in sentences. `reasons` begin with those that decided; the rest tell how far the figures reach.
"""

import math
from pathlib import Path
from typing import Any

from eyas.files import read_json, write_json
from eyas.progress import Progress
from eyas.spec import StepSpec

NEEDS = ("replay", "decode", "train", "vocabulary", "capture")
ABSOLUTE = 0.01
"""Differences up to this are never held against a draft (an accept length, or a rate)."""
STANDARD_ERRORS = 3.0


def run(spec: StepSpec, out: Path, progress: Progress) -> dict[str, Any]:
    """Step entry: read the five results, decide, write `verdict.json`."""
    progress.milestone("weighing the figures")
    found = {name: read_json(spec.inputs[name] / "result.json") for name in NEEDS if name in spec.inputs}
    verdict = decide(**found) if "decode" in found else undecided(**found)
    write_json(out / "verdict.json", verdict)
    return verdict


def decide(
    replay: dict[str, Any],
    decode: dict[str, Any],
    train: dict[str, Any],
    vocabulary: dict[str, Any],
    capture: dict[str, Any],
) -> dict[str, Any]:
    """What verdict.json holds, from the results of the five steps (docs/seams.md)."""
    predicted = _dict(decode.get("predicted"))
    speedup = [{"concurrency": 1, **_interval(_dict(decode.get("speedup")))}]
    lossless = decode.get("lossless") is True
    against = _distrust(predicted, decode, lossless)
    deploy, pace = _deploy(speedup, trusted=not against)
    return {
        "accept_length": {
            "predicted": _accept_length(predicted),
            "served": _accept_length(decode),
            "draft_tokens": _count(decode, "draft_tokens"),
            "by_position": _by_position(predicted, decode),
            "looping": {
                "rows": _count(_dict(decode.get("looping")), "rows"),
                "predicted": _number(_dict(predicted.get("looping")).get("accept_length")),
                "served": _number(_dict(decode.get("looping")).get("accept_length")),
            },
        },
        "speedup": speedup,
        "lossless": lossless,
        "deploy": deploy,
        "reasons": [*against, pace, *_reach(replay, decode, lossless), *_training(train, vocabulary, capture)],
    }


def undecided(
    replay: dict[str, Any], train: dict[str, Any], vocabulary: dict[str, Any], capture: dict[str, Any]
) -> dict[str, Any]:
    """What verdict.json holds where the draft was not served, since eyas does not start the server: a prediction."""
    predicted = _accept_length(replay)
    looping = {
        "rows": _count(_dict(replay.get("looping")), "rows"),
        "predicted": _number(_dict(replay.get("looping")).get("accept_length")),
        "served": None,
    }
    return {
        "accept_length": {
            "predicted": predicted,
            "served": None,
            "draft_tokens": _count(replay, "draft_tokens"),
            "by_position": _by_position(replay, {}),
            "looping": looping,
        },
        "speedup": [],
        "lossless": None,
        "deploy": {"verdict": "no", "max_concurrency": None},
        "reasons": [
            "The draft was not served, so its speed is not known: server.url names a server that eyas does not start. "
            "Start it with the draft (the draft's own page says how) and measure, or let eyas launch it.",
            f"Replay on all held-out answers predicts an accept length of {_say(predicted)}, "
            f"over {_plural(_count(replay, 'rounds'), 'step')}.",
            *_training(train, vocabulary, capture),
        ],
    }


def _distrust(predicted: dict[str, Any], decode: dict[str, Any], lossless: bool) -> list[str]:
    """Sentences that speak against believing the figures at all; none if they may be believed."""
    reasons = []
    if not lossless:
        count = _count(decode, "mismatches")
        reasons.append(
            f"Decoding with the draft is not lossless: {count} of {_plural(_count(decode, 'prompts'), 'answer')} "
            "differ from the target's own. A drafter may only change the speed."
        )
    empty = [what for what, part in (("predicted", predicted), ("decoded", decode)) if not _count(part, "rounds")]
    if empty:
        return [
            *reasons,
            f"Nothing was counted: the {' and the '.join(empty)} accept length rests on no verify step outside looping "
            "rows. Use more or other held-out prompts (prompts.heldout).",
        ]
    for what, part in (("predicted", predicted), ("decoded", decode)):
        reasons += _contradictions(what, part)
    exact = lossless and decode.get("dtype") == "float32"
    return reasons + _disagreements(predicted, decode, exact)


def _contradictions(what: str, part: dict[str, Any]) -> list[str]:
    """An accept length has one definition; a figure that its own counts do not give is not that."""
    counted, said = _accept_length(part), _number(part.get("accept_length"))
    joint = sum(_count(row, "accepted") for row in _positions(part))
    if said is None or counted is None or abs(said - counted) > ABSOLUTE / 2:
        return [f"The {what} accept length is given as {_say(said)}, but its counts make it {_say(counted)}."]
    if joint != _count(part, "accepted"):
        return [
            f"The {what} counts contradict each other: {_count(part, 'accepted')} drafts accepted in all, "
            f"{joint} added up by position."
        ]
    return []


def _disagreements(predicted: dict[str, Any], decode: dict[str, Any], exact: bool) -> list[str]:
    """Where predicted and decoded acceptance on the same prompts differ by more than they may.

    `exact`: both saw the same tokens in float32, where only the draft's own ties can differ: 0.01 is allowed. Else 0.01
    or three standard errors, whichever is larger. The standard error is that of a difference of two samples of one
    population, whose variance is estimated from both sides' counts together. Both sides saw the same prompts, so their
    true spread is smaller, and what exceeds this is a fault: of the replay, the draft or the decoder.
    """
    if _count(predicted, "draft_tokens") != _count(decode, "draft_tokens"):
        return [
            f"Predicted and decoded acceptance cannot be compared: {_count(predicted, 'draft_tokens')} and "
            f"{_count(decode, 'draft_tokens')} draft tokens a step."
        ]
    reasons = []
    one, two = _accept_length(predicted), _accept_length(decode)
    rounds = _count(predicted, "rounds"), _count(decode, "rounds")
    allowed = ABSOLUTE if exact else _allowed(_variance(predicted, decode), *rounds)
    if one is not None and two is not None and abs(one - two) > allowed:
        reasons.append(
            f"Predicted and decoded accept length differ on the same prompts: {one:.3f} and {two:.3f}, "
            f"where {allowed:.3f} is allowed."
        )
    for row in _by_position(predicted, decode):
        n, m = row["reached_predicted"], row["reached"]
        if not n or not m:
            continue
        p, q = row["accepted_predicted"] / n, row["accepted_served"] / m
        rate = min(1.0, (row["accepted_predicted"] + row["accepted_served"]) / (n + m))
        allowed = max(ABSOLUTE, 3 / min(n, m)) if exact else _allowed(rate * (1 - rate), n, m)
        if abs(p - q) > allowed:
            reasons.append(
                f"Acceptance at position {row['position']} differs on the same prompts: {p:.1%} predicted, "
                f"{q:.1%} decoded, where {100 * allowed:.1f} points are allowed."
            )
    return reasons


def _variance(*parts: dict[str, Any]) -> float:
    """Variance of the drafts accepted in one verify step, all parts pooled.

    The joint counts give the whole distribution: P(at least k accepted) = accepted at position k / rounds.
    """
    rounds = sum(_count(part, "rounds") for part in parts)
    mean = square = 0.0
    for part in parts:
        for row in _positions(part):
            share = _count(row, "accepted") / rounds
            mean += share
            square += (2 * _count(row, "position") - 1) * share
    return max(0.0, square - mean * mean)


def _allowed(variance: float, n: int, m: int) -> float:
    return max(ABSOLUTE, STANDARD_ERRORS * math.sqrt(variance * (1 / n + 1 / m)))


def _deploy(speedup: list[dict[str, Any]], trusted: bool) -> tuple[dict[str, Any], str]:
    """The decision, and the sentence on speed that goes with it.

    A concurrency pays if the whole interval of its speed-up lies above 1, and so does every smaller one measured.
    """
    pays = 0
    ordered = sorted(speedup, key=lambda row: int(row["concurrency"]))
    for row in ordered:
        if None in row.values() or row["low"] <= 1:
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
    prompts = _plural(_count(decode, "prompts"), "held-out prompt")
    if lossless:
        ties = _count(decode, "near_ties")
        but = (
            f", save {_plural(ties, 'answer')} that took the other side of a tie between two tokens, as "
            f"{decode.get('dtype')} does"
            if ties
            else ""
        )
        reasons.append(f"Decoding with the draft is lossless: on {prompts} every answer equals the target's own{but}.")
    length = _accept_length(decode)
    if length is not None:
        reasons.append(
            f"Decoded accept length is {length:.2f} tokens a verify step, the bonus token included, with up to "
            f"{_plural(_count(decode, 'draft_tokens'), 'draft token')} a step, over "
            f"{_plural(_count(decode, 'rounds'), 'step')} on {prompts}."
        )
    rates = [
        f"{_count(row, 'accepted') / _count(row, 'reached'):.0%} at position {_count(row, 'position')}"
        for row in _positions(decode)
        if _count(row, "reached")
    ]
    if rates:
        reasons.append(f"Of the drafts that were reached, the target accepted {', '.join(rates)}.")
    everywhere = _accept_length(replay)
    if everywhere is not None:
        reasons.append(
            f"Replay on all held-out answers predicts {everywhere:.2f}, "
            f"over {_plural(_count(replay, 'rounds'), 'step')}."
        )
    looping = _dict(decode.get("looping"))
    rows, length = _count(looping, "rows"), _number(looping.get("accept_length"))
    if rows:
        reasons.append(
            f"{_plural(rows, 'answer')} that repeat themselves flatter any drafter and are left out of these figures; "
            f"alone they reach {_say(length)}."
        )
    timed = _count(decode, "timed_tokens")
    engine = f"on {decode['engine']}" if isinstance(decode.get("engine"), str) else "in-process"
    reasons.append(
        f"The speed-up was measured {engine}, one request at a time"
        f"{f', on answers of up to {timed} tokens' if timed else ''}. It says nothing about another engine, about "
        "batches or about other hardware: measure there before you deploy."
    )
    return reasons


def _training(train: dict[str, Any], vocabulary: dict[str, Any], capture: dict[str, Any]) -> list[str]:
    """What the draft was made from."""
    reasons = []
    coverage = _number(vocabulary.get("coverage"))
    if coverage is not None:
        reasons.append(
            f"The draft vocabulary of {_plural(_count(vocabulary, 'size'), 'token')} holds {coverage:.2%} of the "
            "tokens in the training answers. Any other token is a miss, so acceptance at a position stays below about "
            "that share."
        )
    samples, quarantined = _count(capture, "samples"), _count(capture, "quarantined")
    reasons.append(
        f"{_plural(quarantined, 'captured sample')} failed a proof and {'was' if quarantined == 1 else 'were'} "
        f"quarantined; {_plural(samples, 'sample')} were kept."
        if quarantined
        else f"None of {_plural(samples, 'captured sample')} failed a proof."
    )
    reasons.append(
        f"The draft was trained for {_plural(_count(train, 'steps'), 'step')} on "
        f"{_plural(_count(train, 'tokens'), 'token')}."
    )
    return reasons


def _by_position(predicted: dict[str, Any], decode: dict[str, Any]) -> list[dict[str, int]]:
    left = {_count(row, "position"): row for row in _positions(predicted)}
    right = {_count(row, "position"): row for row in _positions(decode)}
    return [
        {
            "position": position,
            "reached_predicted": _count(left.get(position, {}), "reached"),
            "accepted_predicted": _count(left.get(position, {}), "accepted"),
            "reached": _count(right.get(position, {}), "reached"),
            "accepted_served": _count(right.get(position, {}), "accepted"),
        }
        for position in sorted({*left, *right})
    ]


def _accept_length(part: dict[str, Any]) -> float | None:
    """1 + accepted drafts / verify steps; None without any verify step."""
    rounds = _count(part, "rounds")
    return 1 + _count(part, "accepted") / rounds if rounds else None


def _interval(speedup: dict[str, Any]) -> dict[str, float | None]:
    return {name: _number(speedup.get(name)) for name in ("ratio", "low", "high")}


def _positions(part: dict[str, Any]) -> list[dict[str, Any]]:
    return list(part.get("by_position") or [])


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _number(value: Any) -> float | None:
    """A finite number, or None."""
    finite = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if finite else None


def _count(part: dict[str, Any], name: str) -> int:
    """A count that is there and not negative, else 0."""
    return max(0, int(_number(part.get(name)) or 0))


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _say(value: float | None) -> str:
    return "nothing" if value is None else f"{value:.2f}"
