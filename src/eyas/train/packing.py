"""Samples into token budgets, without padding.

Orders depend on the seed and the epoch alone, so that a resumed run sees what an undisturbed one would have seen.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from eyas.draft.unroll import Packed
from eyas.store.shard import Sample


@dataclass(frozen=True)
class Batch:
    """Packed samples with their features: `aux` [T, 3H] and `last` [T, H] in one dtype, `argmax` int64 [T]."""

    packed: Packed
    aux: torch.Tensor
    last: torch.Tensor
    argmax: torch.Tensor


def group(lengths: Sequence[int], budget: int, order: Iterable[int] | None = None) -> list[list[int]]:
    """Fill batches with samples in `order` up to `budget` tokens; a longer sample has a batch of its own."""
    batches: list[list[int]] = []
    room = 0
    for i in range(len(lengths)) if order is None else order:
        if not batches or lengths[i] > room:
            batches.append([])
            room = budget
        batches[-1].append(i)
        room -= lengths[i]
    return batches


def plan(lengths: Sequence[int], budget: int, epochs: float, seed: int) -> list[list[int]]:
    """The samples of every optimizer step: each epoch in an order of its own, the last one possibly partial."""
    batches = []
    epoch, left = 0, epochs
    while left > 1e-9:
        generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
        order = torch.randperm(len(lengths), generator=generator).tolist()
        batches += group(lengths, budget, order[: max(1, round(min(left, 1) * len(order)))])
        epoch, left = epoch + 1, left - 1
    return batches


def pack(samples: Sequence[Sample], device: torch.device, dtype: torch.dtype) -> Batch:
    """Lay samples one after another on `device`, states as `dtype`."""
    ends = torch.tensor([0] + [len(s.ids) for s in samples]).cumsum(0)
    packed = Packed(
        torch.cat([s.ids for s in samples]).to(device),
        torch.cat([s.answer for s in samples]).to(device),
        ends.to(device),
    )
    return Batch(
        packed,
        torch.cat([s.aux for s in samples]).to(device, dtype),
        torch.cat([s.last for s in samples]).to(device, dtype),
        torch.cat([s.argmax for s in samples]).to(device, torch.int64),
    )
