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
from eyas.store.layout import supervised
from eyas.store.sample import Columns
from eyas.store.store import FeatureStore
from eyas.train.packing import Batch

AHEAD = 2
"""Steps that are read before they are asked for."""
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Rows:
    """What one rank gets of one step, in host memory: its samples one after another, undecoded.

    `columns`: as in a shard, concatenated. `starts` int64 [B+1]: the first token of each sample and the number of all;
    `kept` int64 [S]: the tokens whose last states are there.
    """

    step: int
    keys: list[str]
    columns: Columns
    starts: torch.Tensor
    kept: torch.Tensor


class Steps(IterableDataset[Rows]):
    """The steps of a plan, from step `first` on: what `rank` of `world` gets of each.

    A step with fewer samples than ranks gives some ranks none (`starts` is [0]). `pin`: into page-locked memory, from
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
        """Copy the samples side by side, then give their pages back."""
        found = [self._store.columns(i) for i in samples]
        lengths = [len(columns["input_ids"]) for _, columns in found]
        starts = torch.tensor([0, *lengths]).cumsum(0)
        kept = [start + _kept(columns) for start, (_, columns) in zip(starts.tolist(), found, strict=False)]
        parts = [columns for _, columns in found] or [self._store.nothing()]
        joined = {name: self._join([columns[name] for columns in parts]) for name in parts[0]}
        for i in samples:
            self._store.release(i)
        kept_T = torch.cat(kept) if kept else torch.empty(0, dtype=torch.int64)
        return Rows(step, [key for key, _ in found], joined, starts, kept_T)

    def _join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        shape = (sum(map(len, parts)), *parts[0].shape[1:])
        joined = torch.empty(shape, dtype=parts[0].dtype, pin_memory=self._pin)
        first = 0
        for part in parts:
            joined[first : first + len(part)].view(torch.uint8).copy_(part.view(torch.uint8))
            first += len(part)
        return joined


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
    if len(rows.kept) < len(aux):
        some, last = last, torch.full((len(aux), last.shape[1]), torch.nan, device=device, dtype=dtype)
        last[rows.kept.to(device)] = some.to(dtype)
    packed = Packed(there["input_ids"].long(), there["loss_mask"].bool(), rows.starts.to(device))
    return Batch(packed, aux.to(dtype), last.to(dtype), there["argmax"].long())


def _kept(columns: Columns) -> torch.Tensor:
    """Positions of a sample at which `last` is there: int64 [s]."""
    answer = columns["loss_mask"].bool()
    everywhere = len(columns["last"]) == len(answer)
    return torch.arange(len(answer)) if everywhere else supervised(answer).nonzero().flatten()
