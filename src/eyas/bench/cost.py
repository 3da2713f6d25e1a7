"""What drafting costs on a server, and what accept length pays for it.

A verify round of k draft tokens takes the time of k draft passes and of one pass of the target over k + 1 tokens; it
yields as many tokens as the accept length says. Plain decoding yields one token a pass. So a draft pays where its
accept length exceeds the round's time over the plain token's, whatever draft it is: costs do not depend on acceptance.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


def break_even(row: Mapping[str, Any]) -> float | None:
    """The accept length at which the draft of a bench row begins to pay; None where its costs are not known."""
    if not row.get("round_seconds") or not row.get("token_seconds"):
        return None
    return float(row["round_seconds"] / row["token_seconds"])


def accept_length(row: Mapping[str, Any]) -> float | None:
    """Accept length of all answers of a bench row, looping ones included: they take part in its times."""
    part = row.get("acceptance") or {}
    looping = part.get("looping") or {}
    counted = [(one.get("rounds") or 0, one.get("accept_length") or 1.0) for one in (part, looping)]
    rounds = sum(count for count, _ in counted)
    return sum(count * length for count, length in counted) / rounds if rounds else None


@dataclass(frozen=True)
class Costs:
    """Measured costs at one concurrency."""

    token: float
    """Seconds of a plain token of one request."""
    rounds: dict[int, float]
    """Seconds of a verify round of one request, by draft tokens; at least one was measured."""

    def round(self, draft_tokens: int) -> float:
        """Seconds of a round of `draft_tokens`: measured, or by a straight line.

        Through two measured lengths or more, by least squares; through one and the plain token, which is a round of no
        draft token, where no more is known.
        """
        if draft_tokens in self.rounds:
            return self.rounds[draft_tokens]
        points = dict(self.rounds) if len(self.rounds) > 1 else {0: self.token, **self.rounds}
        middle = sum(points) / len(points)
        level = sum(points.values()) / len(points)
        slope = sum((k - middle) * (seconds - level) for k, seconds in points.items()) / sum(
            (k - middle) ** 2 for k in points
        )
        return max(self.token, level + slope * (draft_tokens - middle))

    def basis(self, draft_tokens: int) -> str:
        """What `round` rests on: `measured`, `fitted` (two other lengths or more), `estimated` (one)."""
        return "measured" if draft_tokens in self.rounds else "fitted" if len(self.rounds) > 1 else "estimated"

    def speedup(self, draft_tokens: int, accept: float) -> float:
        """How many times as fast as plain decoding a draft of this accept length is expected to be."""
        return accept * self.token / self.round(draft_tokens)
