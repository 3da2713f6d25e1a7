"""Parity: is a draft accepted as replay predicts, on the same prompts?

Compares two *acceptance* objects (docs/seams.md). What exceeds the tolerance, which comes from the counts themselves,
is a fault: of the replay, the draft, the server or the decoder. `bench/diagnose.py` then looks for which.
"""

import math
from typing import Any

ABSOLUTE = 0.01
"""Differences up to this are never held against a draft (an accept length, or a rate)."""
STANDARD_ERRORS = 3.0


def differs(decode: dict[str, Any]) -> list[str]:
    """Where a decode step's own figures differ from the prediction on the same prompts; empty: parity holds."""
    exact = decode.get("lossless") is True and decode.get("dtype") == "float32"
    return compare(decode.get("predicted") or {}, decode, exact)


def compare(predicted: dict[str, Any], served: dict[str, Any], exact: bool) -> list[str]:
    """Where predicted and served acceptance on the same prompts differ by more than they may; empty: nowhere.

    `exact`: both saw the same tokens in float32, where only the draft's own ties can differ: 0.01 is allowed. Else 0.01
    or three standard errors, whichever is larger. The standard error is that of a difference of two samples of one
    population, whose variance is estimated from both sides' counts together. Both sides saw the same prompts, so their
    true spread is smaller, and what exceeds this is a fault.
    """
    if count(predicted, "draft_tokens") != count(served, "draft_tokens"):
        return [
            f"Predicted and decoded acceptance cannot be compared: {count(predicted, 'draft_tokens')} and "
            f"{count(served, 'draft_tokens')} draft tokens a step."
        ]
    reasons = []
    one, two = accept_length(predicted), accept_length(served)
    if one is None or two is None:
        return []
    rounds = count(predicted, "rounds"), count(served, "rounds")
    may = ABSOLUTE if exact else allowed(variance(predicted, served), *rounds)
    if abs(one - two) > may:
        reasons.append(
            f"Predicted and decoded accept length differ on the same prompts: {one:.3f} and {two:.3f}, "
            f"where {may:.3f} is allowed."
        )
    for row in by_position(predicted, served):
        n, m = row["reached_predicted"], row["reached"]
        if not n or not m:
            continue
        p, q = row["accepted_predicted"] / n, row["accepted_served"] / m
        rate = min(1.0, (row["accepted_predicted"] + row["accepted_served"]) / (n + m))
        may = max(ABSOLUTE, 3 / min(n, m)) if exact else allowed(rate * (1 - rate), n, m)
        if abs(p - q) > may:
            reasons.append(
                f"Acceptance at position {row['position']} differs on the same prompts: {p:.1%} predicted, "
                f"{q:.1%} decoded, where {100 * may:.1f} points are allowed."
            )
    return reasons


def by_position(predicted: dict[str, Any], served: dict[str, Any]) -> list[dict[str, int]]:
    """Both sides' counts at each position: `reached_predicted`, `accepted_predicted`, `reached`, `accepted_served`."""
    left = {count(row, "position"): row for row in positions(predicted)}
    right = {count(row, "position"): row for row in positions(served)}
    return [
        {
            "position": position,
            "reached_predicted": count(left.get(position, {}), "reached"),
            "accepted_predicted": count(left.get(position, {}), "accepted"),
            "reached": count(right.get(position, {}), "reached"),
            "accepted_served": count(right.get(position, {}), "accepted"),
        }
        for position in sorted({*left, *right})
    ]


def variance(*parts: dict[str, Any]) -> float:
    """Variance of the drafts accepted in one verify step, all parts pooled.

    The joint counts give the whole distribution: P(at least k accepted) = accepted at position k / rounds.
    """
    rounds = sum(count(part, "rounds") for part in parts)
    mean = square = 0.0
    for part in parts:
        for row in positions(part):
            share = count(row, "accepted") / rounds
            mean += share
            square += (2 * count(row, "position") - 1) * share
    return max(0.0, square - mean * mean)


def allowed(spread: float, n: int, m: int) -> float:
    """How far two means of `n` and `m` draws of one population with the variance `spread` may lie apart."""
    return max(ABSOLUTE, STANDARD_ERRORS * math.sqrt(spread * (1 / n + 1 / m)))


def accept_length(part: dict[str, Any]) -> float | None:
    """1 + accepted drafts / verify steps; None without any verify step."""
    rounds = count(part, "rounds")
    return 1 + count(part, "accepted") / rounds if rounds else None


def positions(part: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of an acceptance by position; none where it has none."""
    return list(part.get("by_position") or [])


def number(value: Any) -> float | None:
    """A finite number, or None."""
    finite = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if finite else None


def count(part: dict[str, Any], name: str) -> int:
    """A count that is there and not negative, else 0."""
    return max(0, int(number(part.get(name)) or 0))
