"""The data set of a training run: the samples of each optimizer step, read ahead, as they stand in the store.

Which samples a step sees follows from the plan and the step's number alone (`train/packing.py`), so a run goes on in
the middle of an epoch with exactly what an undisturbed one would have seen. The samples of a step are divided among
ranks, so that the step is the same whatever their number. States travel to the device undecoded: fp8 halves what is
read and copied, and is decoded there.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch.utils.data import IterableDataset

from eyas.draft.unroll import Packed
from eyas.store import codec
from eyas.store.codec import FP8
from eyas.store.layout import Layout, supervised
from eyas.store.sample import Columns
from eyas.store.store import FeatureStore
from eyas.train.packing import Batch

AHEAD = 2
"""Steps that are read before they are asked for."""
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Rows:
    """What one rank gets of one step, in host memory: its samples one after another, undecoded, as in a shard."""

    step: int
    layout: Layout
    columns: Columns

    @property
    def keys(self) -> list[str]:
        """Of the samples, in order."""
        return [place.key for place in self.layout.places]


class Steps(IterableDataset[Rows]):
    """The steps of a plan, from step `first` on: what `rank` of `world` gets of each.

    A step with fewer samples than ranks gives some ranks none. `pin`: into page-locked memory, from
    which a GPU copies beside its work. Memory: one step's samples. Not for DataLoader workers, which would send states
    through /dev/shm: `ahead` reads on a thread. Raises UserError where a sample is damaged.
    """

    def __init__(
        self,
        store: FeatureStore,
        plan: Sequence[Sequence[int]],
        first: int = 0,
        rank: int = 0,
        world: int = 1,
        pin: bool = False,
    ) -> None:
        assert 0 <= rank < world
        self._store, self._plan, self._first = store, plan, first
        self._kind = store.contract.hidden_size, getattr(torch, store.contract.dtype)
        self._rank, self._world, self._pin = rank, world, pin

    def __len__(self) -> int:
        return len(self._plan) - self._first

    def __iter__(self) -> Iterator[Rows]:
        assert torch.utils.data.get_worker_info() is None, "not in a DataLoader's worker"
        for step in range(self._first, len(self._plan)):
            samples = self._plan[step]
            if self._world > 1:
                samples = share(samples, self._store.lengths, self._rank, self._world)
            yield self._read(step, samples)

    def _read(self, step: int, samples: Sequence[int]) -> Rows:
        """Read the samples side by side, in the form of a shard of their own."""
        found = [self._store.where(i) for i in samples]
        layout = Layout([shard.place(index) for shard, index in found], *self._kind)
        columns = layout.allocate(self._pin)
        for number, sample in enumerate(samples):
            self._store.read(sample, {name: columns[name][layout.rows(name, number)] for name in columns})
        return Rows(step, layout, columns)


def share(samples: Sequence[int], lengths: Sequence[int], rank: int, world: int) -> list[int]:
    """What `rank` gets of a step's samples: the longest first, each to the rank with the fewest tokens so far."""
    tokens, mine = [0] * world, []
    for sample in sorted(samples, key=lambda i: (-lengths[i], i)):
        least = tokens.index(min(tokens))
        tokens[least] += lengths[sample]
        if least == rank:
            mine.append(sample)
    return mine


def ahead(steps: Iterable[T], depth: int = AHEAD) -> Iterator[T]:
    """The same items, read on a thread, `depth` of them before they are asked for. Errors come where they belong."""
    source = iter(steps)
    pool = ThreadPoolExecutor(1, "samples")
    try:
        waiting: deque[Future[T | None]] = deque(pool.submit(next, source, None) for _ in range(depth))
        while (item := waiting.popleft().result()) is not None:
            waiting.append(pool.submit(next, source, None))
            yield item
    finally:
        pool.shutdown(cancel_futures=True)


def to_batch(rows: Rows, device: torch.device, dtype: torch.dtype) -> Batch:
    """Copy to `device` and decode there, states as `dtype`; rows of `last` that were not kept are NaN."""
    there = {name: tensor.to(device, non_blocking=True) for name, tensor in rows.columns.items()}
    aux, last = there["aux"], there["last"]
    if aux.dtype == FP8:
        aux = codec.decode(aux, there["aux_scale"], dtype)
        last = codec.decode(last, there["last_scale"], dtype)
    if len(last) < len(aux):
        kept, some = _kept(rows), last
        last = torch.full((len(aux), some.shape[1]), torch.nan, device=device, dtype=dtype)
        last[kept.to(device)] = some.to(dtype)
    starts = torch.tensor(rows.layout.offsets, device=device)
    packed = Packed(there["input_ids"].long(), there["loss_mask"].bool(), starts)
    return Batch(packed, aux.to(dtype), last.to(dtype), there["argmax"].long())


def _kept(rows: Rows) -> torch.Tensor:
    """The tokens whose last states are there: bool [T]."""
    parts = []
    for number, place in enumerate(rows.layout.places):
        answer = rows.columns["loss_mask"][rows.layout.rows("loss_mask", number)].bool()
        parts.append(torch.ones_like(answer) if place.kept == place.tokens else supervised(answer))
    return torch.cat(parts)
