"""Samples into token budgets, without padding.

Orders depend on the seed and the epoch alone, so that a resumed run sees what an undisturbed one would have seen.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from eyas.draft.chains import Chains, chains
from eyas.store.shard import Sample


@dataclass(frozen=True)
class Batch:
    """Packed samples with the features that somebody reads, in the dtype to work in.

    `aux` [s, 3H] at `chains.seen`; `last` [n, H] and `argmax` int64 [n], -1 for unknown, at each row's label.
    """

    chains: Chains
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


def pack(samples: Sequence[Sample], steps: int, device: torch.device, dtype: torch.dtype) -> Batch:
    """Lay samples one after another on `device`, states as `dtype`, for `steps` steps; copies do not wait."""
    starts = torch.tensor([0] + [len(s.ids) for s in samples]).cumsum(0)
    what = chains(torch.cat([s.ids for s in samples]), torch.cat([s.answer for s in samples]), starts, steps)
    widths = torch.searchsorted(what.seen, starts).diff().tolist()
    rows = torch.searchsorted(what.slots, starts).tolist()
    labels = [what.slots[a:b] - start + 1 for (a, b), start in zip(pairwise(rows), starts.tolist(), strict=False)]

    def joined(parts: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        parts = [part.to(dtype) for part in parts]
        if parts[0].device.type == device.type:
            return torch.cat(parts)
        shape = sum(map(len, parts)), *parts[0].shape[1:]
        pinned = torch.empty(shape, dtype=dtype, pin_memory=True)
        return torch.cat(parts, out=pinned).to(device, non_blocking=True)

    return Batch(
        what.to(device),
        joined([s.aux[:width] for s, width in zip(samples, widths, strict=True)], dtype),
        joined([_at(s.last, label) for s, label in zip(samples, labels, strict=True)], dtype),
        joined([_at(s.argmax, label) for s, label in zip(samples, labels, strict=True)], torch.int64),
    )


def _at(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """x[places], without a copy where these ascending places stand side by side."""
    if len(places) and int(places[-1] - places[0]) == len(places) - 1:
        return x[int(places[0]) : int(places[-1]) + 1]
    return x[places]
