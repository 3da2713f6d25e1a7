"""A finished shard, opened for reading. Its form: `store/layout.py`; how it is written: `store/writer.py`."""

import mmap
import os
import weakref
from pathlib import Path

import torch
import xxhash

from eyas.errors import UserError
from eyas.store.layout import DTYPES, FORMAT, Layout, Place, parse
from eyas.store.sample import Columns, Sample, begin_digest, digest, from_columns, raw

__all__ = ["Sample", "Shard"]

MAX_HEADER = 100_000_000
"""Bytes; the limit of the safetensors format."""
PIECE = 1 << 19
"""Bytes that are read, then digested while they are in the processor's cache."""
ABSENT = bytes(16)
"""Digest of a sample that is not there."""


class Shard:
    """A shard opened for reading: memory-mapped, so that only what is used is read.

    `keys`: of the samples, in order. `lengths`: tokens of each. `hidden_size`, `dtype`: of the states. `digest`: of the
    head, which holds the samples' digests and so stands for the whole content. `path` may be a shard in progress:
    then the samples are those that claim to be there.
    Raises UserError that names the file: missing, truncated, foreign, or of another format.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self.bytes = os.fstat(file.fileno()).st_size
                length = int.from_bytes(file.read(8), "little")
                if not 0 < length <= min(self.bytes - 8, MAX_HEADER):
                    raise _unusable(path, "cut short, or no shard")
                header = file.read(length)
                self._map = mmap.mmap(file.fileno(), self.bytes, access=mmap.ACCESS_COPY)
                self._handle = os.dup(file.fileno())
                weakref.finalize(self, os.close, self._handle)
        except OSError as error:
            raise UserError(f"{path}: cannot read the shard ({error.strerror}); restore it or capture again") from error
        self._file = torch.frombuffer(self._map, dtype=torch.uint8)
        self.layout = self._read_layout(header)
        digests = self._tensor("digests").tolist()
        self._digests = [bytes(row) for row in digests]
        self._live = [i for i, value in enumerate(self._digests) if value != ABSENT]
        self.digest = xxhash.xxh3_128_hexdigest(self._map[: self.layout.head])
        self.hidden_size, self.dtype = self.layout.hidden, self.layout.dtype
        self.keys = [self.layout.places[i].key for i in self._live]
        self.lengths = [self.layout.places[i].tokens for i in self._live]

    def __len__(self) -> int:
        return len(self._live)

    @property
    def supervised(self) -> int:
        """Number of answer tokens."""
        return sum(int(self._part("loss_mask", i).count_nonzero()) for i in self._live)

    @property
    def complete(self) -> bool:
        """Is `last` kept at every token?"""
        return all(place.kept == place.tokens for place in self.layout.places)

    def sample(self, index: int) -> Sample:
        """Sample `index`, counted from 0. Its states may be views of the file: change copies, not them."""
        return from_columns(self.keys[index], self.columns(index))

    def ids(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids int64 [t] and answers bool [t] of sample `index`; no states are read."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self._part("input_ids", self._live[index]).long(), self._part("loss_mask", self._live[index]).bool()

    def columns(self, index: int) -> Columns:
        """Sample `index` as it stands in the file: views, in the order of the file."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        self._advise(index, mmap.MADV_WILLNEED)
        return {name: self._part(name, self._live[index]) for name in self.layout.columns}

    def read(self, index: int, into: Columns, compare: bool) -> bool:
        """Copy sample `index`, as it stands in the file, into contiguous tensors of its shapes; faster than copying its
        views, for no page of the file is mapped. Returns False where its digest was to be compared and differs.

        Raises UserError: cut short meanwhile.
        """
        state = begin_digest(self.keys[index], into["aux"])
        for name, tensor in into.items():
            first, count = self.layout.span(name, self._live[index])
            view = raw(tensor)
            assert len(view) == count, name
            for start in range(0, count, PIECE):
                piece = view[start : start + PIECE]
                if os.preadv(self._handle, [piece], first + start) < len(piece):
                    raise _unusable(self.path, "cut short")
                if compare:
                    state.update(piece)
        return not compare or state.digest() == self._digests[self._live[index]]

    def release(self, index: int) -> None:
        """Take the sample's pages out of this process's memory; they are read again when they are used again."""
        self._advise(index, mmap.MADV_DONTNEED)

    def place(self, index: int) -> Place:
        """Where sample `index` stands."""
        return self.layout.places[self._live[index]]

    def sample_digest(self, index: int) -> str:
        """Digest of sample `index` as it was written, in hexadecimal."""
        return self._digests[self._live[index]].hex()

    def is_whole(self, index: int) -> bool:
        """Are the bytes of sample `index` those that were written?"""
        return digest(self.keys[index], self.columns(index)) == self._digests[self._live[index]]

    def verify(self) -> list[str]:
        """Read everything; return the keys of the samples whose bytes are not those that were written."""
        damaged = []
        for index, key in enumerate(self.keys):
            if not self.is_whole(index):
                damaged.append(key)
            self.release(index)
        return damaged

    def _part(self, name: str, place: int) -> torch.Tensor:
        return self._tensor(name)[self.layout.rows(name, place)]

    def _tensor(self, name: str) -> torch.Tensor:
        first, dtype, shape = self.layout.tensors[name]
        count = dtype.itemsize
        for size in shape:
            count *= size
        return self._file[first : first + count].view(dtype).view(shape)

    def _advise(self, index: int, advice: int) -> None:
        page = mmap.PAGESIZE
        for name in self.layout.columns:
            first, count = self.layout.span(name, self._live[index])
            if count >= page:
                self._map.madvise(advice, first // page * page, count + first % page)

    def _read_layout(self, header: bytes) -> Layout:
        """The layout that the head describes; it must be the one that eyas would write, byte for byte."""
        try:
            keys, entries = parse(header)
            base = 8 + len(header)
            samples, hidden = len(keys), entries["last"]["shape"][1]
            end = base + 16 * (samples + 1)
            if not samples or end > self.bytes:
                raise ValueError("no samples")
            table = self._file[base:end].view(torch.int64).view(2, -1)
            tokens, kept = table.diff().tolist()
            places = [Place(*fields) for fields in zip(keys, tokens, kept, strict=True)]
            layout = Layout(places, hidden, DTYPES[entries["last"]["dtype"]])
            if layout.header[8:] != header or table[:, 0].any():
                raise ValueError("its head contradicts itself")
        except ValueError as error:
            if len(error.args) == 2 and error.args[0] == FORMAT:
                raise UserError(
                    f"{self.path}: shard format {error.args[1]!r}, this eyas reads {FORMAT!r}: use the eyas that wrote "
                    "it, or capture again"
                ) from error
            raise _unusable(self.path, f"not one that eyas wrote: {error}") from error
        except (KeyError, TypeError, IndexError, AttributeError, AssertionError, RuntimeError) as error:
            raise _unusable(self.path, f"its head is not that of a shard: {error!r}") from error
        if layout.size != self.bytes:
            raise _unusable(self.path, f"{self.bytes} bytes where its head says {layout.size}")
        return layout


def _unusable(path: Path, why: str) -> UserError:
    return UserError(f"{path}: not a usable shard ({why}): delete it and run the same command again")
