"""A shard: one safetensors file of packed samples, whole or absent.

Samples stand one after another, without padding (padding costs 3.5 to 4 times the bytes). All lengths are known before
the first byte is written, so the header comes first and the samples are copied straight from where they are. Any
safetensors reader can read the file:

| tensor | shape | dtype |
|---|---|---|
| offsets | [B+1] | int64, sample i is rows offsets[i] to offsets[i+1] |
| input_ids | [T] | int32 |
| argmax | [T] | int32 |
| aux | [T, 3H] | float32 or bfloat16 |
| last | [T, H] | the same |
| loss_mask | [T] | uint8 |

The metadata holds `format`, `keys` and `digests`, the last two as JSON lists with an entry for each sample. Widest
elements come first, so that every tensor is aligned.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash

from eyas.errors import UserError
from eyas.files import replacing

FORMAT = "eyas-shard-1"
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "I64": torch.int64, "I32": torch.int32, "U8": torch.uint8}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
ALIGNMENT = 8
MAX_HEADER = 100_000_000
"""Bytes; the limit of the safetensors format."""


@dataclass(frozen=True, eq=False)
class Sample:
    """One conversation with the target's states at its t tokens."""

    key: str
    ids: torch.Tensor
    """int64 [t]."""
    answer: torch.Tensor
    """bool [t]: x[i] belongs to an answer."""
    aux: torch.Tensor
    """[t, 3H]: the three captured layers side by side, low to high, float32 or bfloat16."""
    last: torch.Tensor
    """[t, H]: the last hidden state, in the dtype of `aux`."""
    argmax: torch.Tensor
    """int64 [t]: the target's full-vocabulary greedy choice after each position; -1 where not known."""


def write(path: Path, samples: Sequence[Sample]) -> None:
    """Write `samples` as the shard `path`, which appears whole or not at all (written aside, fsync, rename).

    Needs no memory beyond the samples themselves. Shapes and dtypes that do not agree are the caller's fault
    (AssertionError); OSError passes through.
    """
    assert samples, "a shard holds at least one sample"
    hidden, dtype = samples[0].last.shape[1], samples[0].last.dtype
    for sample in samples:
        _check(sample, hidden, dtype)
    keys = [sample.key for sample in samples]
    assert len(set(keys)) == len(keys), "a sample key occurs twice"

    lengths = torch.tensor([0, *(len(sample.ids) for sample in samples)])
    offsets = lengths.cumsum(0)
    columns = [_columns(sample) for sample in samples]
    digests = [_digest(key, column) for key, column in zip(keys, columns, strict=True)]
    layout = _layout(int(offsets[-1]), len(samples), hidden, dtype)
    metadata = {"format": FORMAT, "keys": json.dumps(keys), "digests": json.dumps(digests)}
    header = json.dumps({"__metadata__": metadata, **layout}, separators=(",", ":")).encode()
    header += b" " * (-len(header) % ALIGNMENT)

    with replacing(path) as file:
        file.write(len(header).to_bytes(8, "little"))
        file.write(header)
        file.write(_raw(offsets))
        for name in list(layout)[1:]:
            for column in columns:
                file.write(_raw(column[name]))


class Shard:
    """A shard opened for reading: memory-mapped, so that only what is used is read.

    `keys`: of the samples, in order. `lengths`: tokens of each. `hidden_size`, `dtype`: of the states. `digest`: of the
    header, which holds the samples' digests and so stands for the whole content.
    Raises UserError that names the file: missing, truncated, foreign, or of a newer format.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self.bytes = os.fstat(file.fileno()).st_size
                length = int.from_bytes(file.read(8), "little")
                if not 0 < length <= min(self.bytes - 8, MAX_HEADER):
                    raise _unusable(path, "cut short, or no shard")
                raw = file.read(length)
        except OSError as error:
            raise UserError(f"{path}: cannot read the shard ({error.strerror}); restore it or capture again") from error
        header, self.keys, self._digests = _parse(path, raw)
        try:
            count, tokens = len(self.keys), header["input_ids"]["shape"][0]
            self.hidden_size: int = header["last"]["shape"][1]
            self.dtype: torch.dtype = DTYPES[header["last"]["dtype"]]
            layout = _layout(tokens, count, self.hidden_size, self.dtype)
            end = 8 + length + max(entry["data_offsets"][1] for entry in layout.values())
        except (KeyError, TypeError, IndexError, AttributeError) as error:
            raise _unusable(path, f"its header is not that of a shard: {error!r}") from error
        if header != layout or len(self._digests) != count or not count:
            raise _unusable(path, "its header contradicts itself")
        if end != self.bytes:
            raise _unusable(path, f"{self.bytes} bytes where its header says {end}")
        self.digest = xxhash.xxh3_128_hexdigest(raw)
        file_bytes = torch.from_file(str(path), shared=False, size=self.bytes, dtype=torch.uint8)
        self._tensors = {
            name: file_bytes[8 + length + entry["data_offsets"][0] : 8 + length + entry["data_offsets"][1]]
            .view(DTYPES[entry["dtype"]])
            .view(entry["shape"])
            for name, entry in layout.items()
        }
        self._offsets: list[int] = self._tensors["offsets"].tolist()
        self.lengths = [b - a for a, b in zip(self._offsets, self._offsets[1:], strict=False)]
        if self._offsets[0] != 0 or self._offsets[-1] != tokens or min(self.lengths) < 1:
            raise _unusable(path, "its offsets are damaged")

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def supervised(self) -> int:
        """Number of answer tokens."""
        return int(self._tensors["loss_mask"].count_nonzero())

    def sample(self, index: int) -> Sample:
        """Sample `index`, counted from 0. Its states are views of the file: change copies, not them."""
        column = self._column(index)
        return Sample(
            key=self.keys[index],
            ids=column["input_ids"].long(),
            answer=column["loss_mask"].bool(),
            aux=column["aux"],
            last=column["last"],
            argmax=column["argmax"].long(),
        )

    def is_whole(self, index: int) -> bool:
        """Are the bytes of sample `index` those that were written?"""
        return _digest(self.keys[index], self._column(index)) == self._digests[index]

    def verify(self) -> list[str]:
        """Read everything; return the keys of the samples whose bytes are not those that were written."""
        return [key for index, key in enumerate(self.keys) if not self.is_whole(index)]

    def _column(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        rows = slice(self._offsets[index], self._offsets[index + 1])
        return {name: tensor[rows] for name, tensor in self._tensors.items() if name != "offsets"}


def _check(sample: Sample, hidden: int, dtype: torch.dtype) -> None:
    """Assert that a sample is whole and of the shard's kind."""
    rows, limit = len(sample.ids), torch.iinfo(torch.int32).max
    assert rows > 0, sample.key
    assert dtype in (torch.float32, torch.bfloat16), sample.key
    assert sample.aux.dtype == sample.last.dtype == dtype, sample.key
    assert sample.ids.dtype == sample.argmax.dtype == torch.int64, sample.key
    assert sample.answer.dtype == torch.bool, sample.key
    assert sample.aux.shape == (rows, 3 * hidden), sample.key
    assert sample.last.shape == (rows, hidden), sample.key
    assert sample.ids.shape == sample.answer.shape == sample.argmax.shape == (rows,), sample.key
    assert 0 <= int(sample.ids.min()) <= int(sample.ids.max()) <= limit, sample.key
    assert -1 <= int(sample.argmax.min()) <= int(sample.argmax.max()) <= limit, sample.key


def _columns(sample: Sample) -> dict[str, torch.Tensor]:
    """A sample's tensors as they stand in the file, in the file's order."""
    return {
        "input_ids": sample.ids.int(),
        "argmax": sample.argmax.int(),
        "aux": sample.aux,
        "last": sample.last,
        "loss_mask": sample.answer.to(torch.uint8),
    }


def _layout(tokens: int, samples: int, hidden: int, dtype: torch.dtype) -> dict[str, dict[str, Any]]:
    """The tensors' part of the header; it follows from these four facts alone."""
    layout: dict[str, dict[str, Any]] = {}
    start = 0
    for name, kind, shape in (
        ("offsets", torch.int64, [samples + 1]),
        ("input_ids", torch.int32, [tokens]),
        ("argmax", torch.int32, [tokens]),
        ("aux", dtype, [tokens, 3 * hidden]),
        ("last", dtype, [tokens, hidden]),
        ("loss_mask", torch.uint8, [tokens]),
    ):
        end = start + kind.itemsize * shape[0] * (shape[1] if len(shape) == 2 else 1)
        layout[name] = {"dtype": NAMES[kind], "shape": shape, "data_offsets": [start, end]}
        start = end
    return layout


def _parse(path: Path, raw: bytes) -> tuple[dict[str, Any], list[str], list[str]]:
    """The header without its metadata, the keys and the digests."""
    try:
        header = json.loads(raw)
        metadata = header.pop("__metadata__")
        version = metadata["format"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _unusable(path, "not a shard that eyas wrote") from error
    if version != FORMAT:
        raise UserError(f"{path}: shard format {version!r}, this eyas reads {FORMAT!r}: use the eyas that wrote it")
    try:
        keys, digests = json.loads(metadata["keys"]), json.loads(metadata["digests"])
    except (ValueError, KeyError, TypeError) as error:
        raise _unusable(path, "its list of samples is damaged") from error
    if not isinstance(keys, list) or not isinstance(digests, list):
        raise _unusable(path, "its list of samples is damaged")
    return header, keys, digests


def _digest(key: str, column: dict[str, torch.Tensor]) -> str:
    """Digest of a sample: its key, its length, dtype and width, then the bytes of all its tensors in file order."""
    aux = column["aux"]
    state = xxhash.xxh3_128(f"{key} {tuple(aux.shape)} {NAMES[aux.dtype]} ".encode())
    for tensor in column.values():
        state.update(_raw(tensor))
    return state.hexdigest()


def _raw(tensor: torch.Tensor) -> memoryview:
    """A tensor's bytes, without a copy where it is contiguous and on the CPU."""
    return tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data.cast("B")


def _unusable(path: Path, why: str) -> UserError:
    return UserError(f"{path}: not a usable shard ({why}): delete it and run the same command again")
