"""The data set of a training run: the samples of each optimizer step, read ahead, as they stand in the store.

Which samples a step sees follows from the plan and the step's number alone (`train/packing.py`), so a run goes on in
the middle of an epoch with exactly what an undisturbed one would have seen. The samples of a step are divided among
ranks, so that the step is the same whatever their number. States travel to the device undecoded: fp8 halves what is
read and copied, and is decoded there.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.utils.data import IterableDataset

from eyas.draft.chains import chains
from eyas.store import codec
from eyas.store.codec import FP8
from eyas.store.layout import Layout, supervised
from eyas.store.sample import Columns
from eyas.store.store import FeatureStore
from eyas.train.packing import Batch, group
from eyas.train.parallel import World

WHOLE = 1 << 62
"""Tokens of a part that holds any step whole."""
ALONE = World()


@dataclass(frozen=True, eq=False)
class Rows:
    """A part of what one rank gets of a step, in host memory: samples one after another, undecoded, as in a shard."""

    step: int
    layout: Layout
    columns: Columns

    @property
    def keys(self) -> list[str]:
        """Of the samples, in order."""
        return [place.key for place in self.layout.places]


class Steps(IterableDataset[list[Rows]]):
    """The steps of a plan, from step `first` on: what this rank of `world` gets of each, in parts of `part_tokens`.

    A step with fewer samples than ranks gives some ranks none. `pin`: into page-locked memory, from
    which a GPU copies beside its work. Memory: one step's samples. Not for DataLoader workers, which would send states
    through /dev/shm: `train/loader.py` reads on a thread. Raises UserError where a sample is damaged.
    """

    def __init__(
        self,
        store: FeatureStore,
        plan: Sequence[Sequence[int]],
        first: int = 0,
        world: World = ALONE,
        part_tokens: int = WHOLE,
        pin: bool = False,
    ) -> None:
        self._store, self._plan, self._first = store, plan, first
        self._lengths = store.lengths
        self._kind = store.contract.hidden_size, getattr(torch, store.contract.dtype)
        self._world, self._part_tokens, self._pin = world, part_tokens, pin

    def __len__(self) -> int:
        return len(self._plan) - self._first

    def __iter__(self) -> Iterator[list[Rows]]:
        assert torch.utils.data.get_worker_info() is None, "not in a DataLoader's worker"
        return map(self.read, range(self._first, len(self._plan)))

    def read(self, step: int) -> list[Rows]:
        """What this rank gets of a step, each part's samples side by side in the form of a shard of its own."""
        samples = self._plan[step]
        mine = [samples[i] for i in self._world.share([self._lengths[i] for i in samples])]
        parts = group([self._lengths[i] for i in mine], self._part_tokens) or [[]]
        return [self._read(step, [mine[i] for i in part]) for part in parts]

    def _read(self, step: int, samples: Sequence[int]) -> Rows:
        found = [self._store.where(i) for i in samples]
        layout = Layout([shard.place(index) for shard, index in found], *self._kind)
        columns = layout.allocate(self._pin)
        for number, sample in enumerate(samples):
            self._store.read(sample, {name: columns[name][layout.rows(name, number)] for name in columns})
        return Rows(step, layout, columns)


def to_batch(rows: Rows, steps: int, device: torch.device, dtype: torch.dtype) -> Batch:
    """The batch of `steps` unroll steps on `device`: only what is read goes there, and is decoded there, to `dtype`."""
    starts = torch.tensor(rows.layout.offsets)
    what = chains(rows.columns["input_ids"].long(), rows.columns["loss_mask"].bool(), starts, steps)
    labels = what.slots + 1
    kept = labels
    if len(rows.columns["last"]) < len(rows.columns["aux"]):
        there = _kept(rows)
        assert bool(there[labels].all()), "a label whose last state was not kept"
        kept = (there.cumsum(0) - 1)[labels]

    def taken(name: str, places: torch.Tensor) -> torch.Tensor:
        column = rows.columns[name].to(device, non_blocking=True)
        picked = _take(column, places.to(device, non_blocking=True))
        if column.dtype != FP8:
            return picked.to(dtype)
        scale = rows.columns[f"{name}_scale"].to(device, non_blocking=True)
        return codec.decode(picked, _take(scale, places.to(device)), dtype)

    argmax = rows.columns["argmax"].long()[labels].to(device, non_blocking=True)
    return Batch(what.to(device), taken("aux", what.seen), taken("last", kept), argmax)


def _take(column: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """column[places]; bytes are indexed as such, since not every device indexes float8."""
    if column.dtype != FP8:
        return column[places]
    return column.view(torch.uint8)[places].view(FP8)


def _kept(rows: Rows) -> torch.Tensor:
    """The tokens whose last states are there: bool [T]."""
    parts = []
    for number, place in enumerate(rows.layout.places):
        answer = rows.columns["loss_mask"][rows.layout.rows("loss_mask", number)].bool()
        parts.append(torch.ones_like(answer) if place.kept == place.tokens else supervised(answer))
    return torch.cat(parts)
