"""Acceptance figures: one definition for replay, decoding and served measurements.

Accept length = 1 + accepted drafts / verify steps, pooled over rows (sum over sum, never a mean of means
[vllm 42508]); the bonus token is the 1. A draft position beyond the row's last token was never reached. Rows that
loop (a repeated 8-gram) inflate acceptance and are reported apart.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Tally:
    """Counts of one or more rows; add rows as they come, then ask."""

    draft_tokens: int
    rounds: int = 0
    reached: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    rows: int = 0

    def __post_init__(self) -> None:
        self.reached = self.reached or [0] * self.draft_tokens
        self.accepted = self.accepted or [0] * self.draft_tokens

    def add_round(self, reached: int, accepted: int) -> None:
        """Count a verify step that judged `reached` drafts one after another and accepted the first `accepted`."""
        assert 0 <= accepted <= reached <= self.draft_tokens
        assert reached in (accepted, accepted + 1)
        self.rounds += 1
        for position in range(reached):
            self.reached[position] += 1
        for position in range(accepted):
            self.accepted[position] += 1

    def add(self, other: "Tally") -> None:
        """Pool with another tally."""
        self.rounds += other.rounds
        self.rows += other.rows
        self.reached = [a + b for a, b in zip(self.reached, other.reached, strict=True)]
        self.accepted = [a + b for a, b in zip(self.accepted, other.accepted, strict=True)]

    @property
    def accept_length(self) -> float:
        """Pooled accept length; 1.0 where nothing was verified."""
        return 1 + sum(self.accepted) / self.rounds if self.rounds else 1.0


def summary(plain: Tally, looping: Tally) -> dict[str, Any]:
    """The *acceptance* object of `docs/seams.md`: rows that do not loop, and those that do, apart."""
    return {
        "accept_length": plain.accept_length,
        "rounds": plain.rounds,
        "accepted": sum(plain.accepted),
        "draft_tokens": plain.draft_tokens,
        "rows": plain.rows,
        "by_position": [
            {"position": i + 1, "reached": reached, "accepted": accepted}
            for i, (reached, accepted) in enumerate(zip(plain.reached, plain.accepted, strict=True))
        ],
        "looping": {"rows": looping.rows, "rounds": looping.rounds, "accept_length": looping.accept_length},
    }


def walk(hits: Sequence[Sequence[int]], first: int, end: int, draft_tokens: int) -> Tally:
    """Walk an answer as a server with this draft would.

    `hits[t][k]` is 1 where the draft's k-th token from slot t equals x[t+2+k]. The answer is x[first:end]; x[first]
    comes from the target's own prefill. Each round drafts from slot t, accepts the joint prefix and moves on by
    accepted + 1; drafts beyond x[end-1] are not reached.
    """
    tally = Tally(draft_tokens, rows=1)
    slot = first - 1
    while slot + 2 < end:
        room = min(draft_tokens, end - slot - 2)
        accepted = 0
        while accepted < room and hits[slot][accepted]:
            accepted += 1
        tally.add_round(min(accepted + 1, room), accepted)
        slot += accepted + 1
    return tally
