"""Writing shards: every sample goes to its place as it arrives, in any order, from several threads or processes.

A shard in progress is NAME.partial, and no reader takes it for NAME.safetensors. Its space is reserved and its head
written before the first sample, so a full disk is known at once. A sample's digest is written once the sample is
durable: killed at any byte, reopened, what has its digest is kept and everything else is asked for again. A sample that
never comes leaves its digest zero: a tombstone.
"""

import os
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from eyas.files import fsync_folder
from eyas.store.layout import Layout
from eyas.store.sample import Columns, Sample, digest, place, raw, to_columns
from eyas.store.shard import ABSENT, Shard

PIECE = 8 << 20
"""Bytes written at once."""


class ShardWriter:
    """A shard in progress; `path` is where it will be. Use `create` or `reopen`.

    `done`: keys of the samples that are durable.
    """

    def __init__(self, path: Path, layout: Layout, done: Iterable[str] = (), aside: Path | None = None) -> None:
        self.path, self.layout, self.aside = path, layout, aside or partial(path)
        self.done = set(done)
        self._index = {place.key: i for i, place in enumerate(layout.places)}
        self._lock = threading.Lock()
        self._waiting: list[tuple[int, bytes]] = []
        self._handle = os.open(self.aside, os.O_RDWR)

    @classmethod
    def create(cls, path: Path, layout: Layout, aside: Path | None = None) -> "ShardWriter":
        """Reserve the space and write the head. Raises OSError: no space for all of it, which is then free again.

        `aside`: the name while it is in progress, where it is not to be reopened.
        """
        assert layout.places, "a shard holds at least one sample"
        aside = aside or partial(path)
        torn = path.with_name(f".{path.name}.{os.getpid()}.head.partial")
        try:
            with torn.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, layout.size)
                file.write(layout.header)
                file.write(raw(torch.tensor([layout.offsets, layout.last_offsets])))
                file.flush()
                os.fsync(file.fileno())
            torn.replace(aside)
        except BaseException:
            torn.unlink(missing_ok=True)
            raise
        fsync_folder(path.parent)
        return cls(path, layout, aside=aside)

    @classmethod
    def reopen(cls, path: Path) -> "ShardWriter":
        """Go on with NAME.partial. Reads all samples that claim to be there; torn ones are not `done`.

        Raises UserError where its head is damaged.
        """
        found = Shard(partial(path))
        return cls(path, found.layout, set(found.keys) - set(found.verify()))

    def put(self, sample: Sample) -> None:
        """Write a sample into its place. It counts once `commit` has returned. Raises OSError."""
        index = self._index[sample.key]
        self.put_columns(sample.key, to_columns(sample, self.layout.places[index], self.layout.dtype))

    def put_columns(self, key: str, columns: Columns) -> None:
        """Write a sample that is in the shard's form already."""
        index = self._index[key]
        assert list(columns) == self.layout.columns
        for name, tensor in columns.items():
            first, count = self.layout.span(name, index)
            assert tensor.dtype == self.layout.tensors[name][1], name
            data = raw(tensor)
            assert len(data) == count, (name, key)
            _pwrite(self._handle, data, first)
        with self._lock:
            self._waiting.append((index, digest(key, columns)))

    def commit(self) -> None:
        """Make durable what was put. Raises OSError."""
        with self._lock:
            if not self._waiting:
                return
            os.fdatasync(self._handle)
            for index, value in self._waiting:
                _pwrite(self._handle, value, self.layout.digest_at(index))
                self.done.add(self.layout.places[index].key)
            self._waiting = []

    def finish(self) -> Shard | None:
        """Make the shard what it will be; None, and no file, where no sample came. What others wrote into it counts."""
        self.commit()
        os.fsync(self._handle)
        found = Shard(self.aside)
        torn = {key for i, key in enumerate(found.keys) if key not in self.done and not found.is_whole(i)}
        for key in torn:
            _pwrite(self._handle, ABSENT, self.layout.digest_at(self._index[key]))
        os.fsync(self._handle)
        self.close()
        if len(torn) == len(found):
            self.aside.unlink()
            return None
        self.aside.replace(self.path)
        fsync_folder(self.path.parent)
        return Shard(self.path)

    def close(self) -> None:
        """Leave it as it is, to be reopened."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


def partial(path: Path) -> Path:
    """The shard's name while it is in progress."""
    return path.with_suffix(".partial")


def write(path: Path, samples: Sequence[Sample], dtype: torch.dtype | None = None, complete: bool = True) -> Shard:
    """Write `samples` as the shard `path`, which appears whole or not at all. `dtype` of the states, default: theirs;
    `complete`: see `place`.

    Shapes and dtypes that do not agree are the caller's fault (AssertionError); OSError passes through.
    """
    assert samples, "a shard holds at least one sample"
    if dtype is None:
        dtype = samples[0].aux.dtype
        assert all(sample.aux.dtype == dtype for sample in samples), "states of several dtypes"
    layout = Layout([place(sample, complete) for sample in samples], samples[0].last.shape[1], dtype)
    columns = (to_columns(sample, where, dtype) for sample, where in zip(samples, layout.places, strict=True))
    return write_columns(path, layout, columns)


def write_columns(path: Path, layout: Layout, columns: Iterable[Columns]) -> Shard:
    """Write samples that are in the shard's form already, in the order of the layout, one at a time."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.partial")
    writer = ShardWriter.create(path, layout, aside)
    try:
        for where, part in zip(layout.places, columns, strict=True):
            writer.put_columns(where.key, part)
        made = writer.finish()
    except BaseException:
        writer.close()
        aside.unlink(missing_ok=True)
        raise
    assert made is not None
    return made


def _pwrite(handle: int, data: bytes | memoryview, first: int) -> None:
    view = memoryview(data)
    for start in range(0, len(view), PIECE):
        piece = view[start : start + PIECE]
        while piece:
            count = os.pwrite(handle, piece, first + start)
            piece, start = piece[count:], start + count
