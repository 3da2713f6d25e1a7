"""The loss: cross-entropy against the target's own next-token distribution, restricted to the draft vocabulary.

A position whose full-vocabulary argmax lies outside the draft vocabulary carries no loss (the position still counts in
the denominator); in every acceptance figure it is a miss.
"""

from collections.abc import Iterable

import torch

from eyas.draft.model import DraftModel
from eyas.draft.unroll import Packed, StepOutput, chain_lengths


class Teacher:
    """The target's distributions at the positions that a batch's steps are compared with.

    `last` [T, H]: the target's last hidden state after its final norm. `argmax` int64 [T]: its full-vocabulary greedy
    choice at each position. `head` [D, H]: the target's lm_head rows of the draft vocabulary.
    """

    def __init__(
        self, batch: Packed, last: torch.Tensor, argmax: torch.Tensor, head: torch.Tensor, t2d: torch.Tensor
    ) -> None:
        starting = chain_lengths(batch, 1).nonzero().flatten()
        positions = starting + 1  # step k of slot t is judged at t+1+k, where a chain of its own starts at t+k
        self._row = torch.full((len(batch.ids),), -1, dtype=torch.int64, device=batch.ids.device)
        self._row[positions] = torch.arange(len(positions), device=batch.ids.device)
        with torch.no_grad():
            logits = last[positions].to(head.dtype) @ head.T
            wide = logits if logits.dtype == torch.float64 else logits.float()
            self._probability = wide.softmax(-1)
        self._known = t2d[argmax[positions]]

    def loss(self, logits: torch.Tensor, slots: torch.Tensor, step: int) -> torch.Tensor:
        """Sum of the step's losses, in float32 or wider; `logits` [n, D] of the draft at `slots`."""
        row = self._row[slots + 1 + step]
        assert bool((row >= 0).all())
        wide = logits if logits.dtype == torch.float64 else logits.float()
        each = wide.logsumexp(-1) - (self._probability[row] * wide).sum(-1)
        return (each * self._known[row]).sum()


def unrolled_loss(
    draft: DraftModel, outputs: Iterable[StepOutput], teacher: Teacher, counts: list[int], decay: float
) -> torch.Tensor:
    """Sum over steps of decay^k * (the step's losses) / counts[k].

    `counts[k]` is the number of positions that count at step k over the global batch (`counting` over all its parts),
    so that parts of a batch may be accumulated.
    """
    total = draft.lm_head.weight.new_zeros((), dtype=torch.float64 if draft.fc.weight.dtype == torch.float64 else None)
    for out in outputs:
        logits = draft.logits(out.hidden)
        total = total + decay**out.step * teacher.loss(logits, out.slots, out.step) / counts[out.step]
    return total


def counting(batch: Packed, steps: int) -> list[int]:
    """Number of positions that count at each step, 0..steps-1."""
    depth = chain_lengths(batch, steps)
    return [int((depth > step).sum()) for step in range(steps)]
