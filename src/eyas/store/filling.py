"""Shards that fill up as samples arrive: planned from the samples' lengths, before any of them is there.

Stands between a capture, whose samples come in any order, and the shard writers. All of it may be called from several
threads. Killed at any moment, `resume` finds what is durable.
"""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from eyas.errors import UserError
from eyas.store.layout import Layout, Place
from eyas.store.sample import Sample
from eyas.store.shard import Shard
from eyas.store.writer import ShardWriter


class Filling:
    """The shards `<folder>/<name>-NNNNN.safetensors`.

    `shards`: the finished ones, in order. `hidden`, `dtype`: of the states as they are stored.
    """

    def __init__(self, folder: Path, name: str, hidden: int, dtype: torch.dtype) -> None:
        self.shards: list[Shard] = []
        self._folder, self._name, self._hidden, self._dtype = folder, name, hidden, dtype
        self._number = 0
        self._lock = threading.Lock()
        self._layouts: dict[Path, Layout] = {}
        self._open: dict[Path, ShardWriter] = {}
        self._missing: dict[Path, set[str]] = {}
        self._where: dict[str, Path] = {}

    def resume(self, wanted: Callable[[str], bool]) -> None:
        """Take over what earlier attempts left, finished or not; what is damaged or holds a stranger is deleted."""
        for path in sorted(self._folder.glob(f"{self._name}-*.safetensors")):
            try:
                shard = Shard(path)
                sound = not shard.verify() and all(map(wanted, shard.keys))
            except UserError:
                sound = False
            if sound:
                self.shards.append(shard)
            else:
                path.unlink()
            self._count(path)
        for path in sorted(self._folder.glob(f"{self._name}-*.partial")):
            final = path.with_suffix(".safetensors")
            try:
                writer = ShardWriter.reopen(final)
            except UserError:
                path.unlink()
                continue
            keys = {place.key for place in writer.layout.places}
            if all(map(wanted, keys)):
                self._take(final, writer.layout)
                self._open[final] = writer
                self._missing[final] -= writer.done
            else:
                writer.close()
                path.unlink()
            self._count(path)

    @property
    def kept(self) -> set[str]:
        """Keys of all samples that are durable."""
        finished = {key for shard in self.shards for key in shard.keys}
        return finished.union(*(writer.done for writer in self._open.values()))

    def plan(self, places: Sequence[Place], most_bytes: int, most_samples: int) -> None:
        """Give each of these samples a place, in this order; those of an unfinished shard have theirs already."""
        group: list[Place] = []
        size = 0
        for place in places:
            if place.key in self._where:
                continue
            more = self.bytes([place])
            if group and (len(group) == most_samples or size + more > most_bytes):
                self._plan(group)
                group, size = [], 0
            group.append(place)
            size += more
        if group:
            self._plan(group)

    def bytes(self, places: Sequence[Place]) -> int:
        """Bytes that their states will take beyond what is reserved already."""
        rows = sum(3 * place.tokens + place.kept for place in places if place.key not in self._where)
        return rows * self._hidden * self._dtype.itemsize

    def put(self, samples: Sequence[Sample]) -> None:
        """Make these samples durable; a shard that has all of its own becomes a finished one. Raises OSError."""
        touched: dict[Path, ShardWriter] = {}
        for sample in samples:
            path = self._where[sample.key]
            touched[path] = self._writer(path)
            touched[path].put(sample)
        for writer in touched.values():
            writer.commit()
        for sample in samples:
            self.settle(sample.key)

    def settle(self, key: str) -> None:
        """Expect this sample no longer: it is there, or will never be. The last one finishes its shard."""
        with self._lock:
            path = self._where[key]
            self._missing[path].discard(key)
            if not self._missing[path]:
                self._finish(path)

    def finish(self) -> None:
        """Finish all shards; what has not come by now leaves a tombstone."""
        with self._lock:
            for path in list(self._open):
                self._finish(path)

    def close(self) -> None:
        """Leave unfinished shards as they are, to be resumed."""
        with self._lock:
            for writer in self._open.values():
                writer.close()

    def _plan(self, group: list[Place]) -> None:
        self._take(
            self._folder / f"{self._name}-{self._number:05}.safetensors", Layout(group, self._hidden, self._dtype)
        )
        self._number += 1

    def _take(self, path: Path, layout: Layout) -> None:
        self._layouts[path] = layout
        self._missing[path] = {place.key for place in layout.places}
        self._where |= dict.fromkeys(self._missing[path], path)

    def _writer(self, path: Path) -> ShardWriter:
        with self._lock:
            if path not in self._open:
                self._open[path] = ShardWriter.create(path, self._layouts[path])
            return self._open[path]

    def _finish(self, path: Path) -> None:
        writer = self._open.pop(path, None)
        shard = writer.finish() if writer is not None else None
        if shard is not None:
            self.shards.append(shard)
            self.shards.sort(key=lambda one: one.path)

    def _count(self, path: Path) -> None:
        self._number = max(self._number, int(path.stem.rpartition("-")[2]) + 1)
