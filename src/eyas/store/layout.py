"""Where everything stands in a shard: one safetensors file of packed samples, any reader can open it.

Samples stand one after another, without padding (padding costs 3.5 to 4 times the bytes). All lengths are known before
the first byte is written, so the head comes first and every sample has its place, whenever it arrives:

| tensor | shape | dtype |
|---|---|---|
| offsets | [B+1] | int64, sample i is rows offsets[i] to offsets[i+1] |
| last_offsets | [B+1] | int64, the same for `last` |
| digests | [B, 16] | uint8, xxh3-128 of each sample; zero: it is not there (a tombstone) |
| input_ids | [T] | int32 |
| argmax | [T] | int32 |
| aux_scale, last_scale | [T, 3], [S, 1] | float32, with fp8 only |
| aux | [T, 3H] | float32, bfloat16 or float8_e4m3fn |
| last | [S, H] | the same |
| loss_mask | [T] | uint8 |

The *head* is everything before `input_ids`. The metadata holds `format` and `keys`, a JSON list. Widest elements come
first, so that every tensor is aligned. S is T where a sample's last states are complete; else they are kept where the
next token belongs to an answer (`supervised`), the only places at which a draft is compared with the target.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch

from eyas.store.codec import FP8

FORMAT = "eyas-shard-2"
DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F8_E4M3": FP8,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
STATES = (torch.float32, torch.bfloat16, FP8)
ALIGNMENT = 8
DIGEST = 16


def supervised(answer: torch.Tensor) -> torch.Tensor:
    """bool [t]: the token after this one belongs to an answer; `answer` bool [t]."""
    return torch.cat([answer[1:], answer.new_zeros(1)])


@dataclass(frozen=True)
class Place:
    """What has to be known of a sample before it is there: its tokens, and at how many of them `last` is kept."""

    key: str
    tokens: int
    kept: int

    def __post_init__(self) -> None:
        assert 0 <= self.kept <= self.tokens
        assert self.tokens > 0


@dataclass(frozen=True)
class Layout:
    """The places of a shard's samples: all of it follows from these three facts.

    `tensors`: by name (first byte, dtype, shape), in file order. `size`: bytes of the file. `head`: of its head.
    """

    places: Sequence[Place]
    hidden: int
    dtype: torch.dtype
    """Of the states."""
    header: bytes = field(init=False, repr=False)
    """The file's first bytes: the length of the JSON, and the JSON."""
    tensors: dict[str, tuple[int, torch.dtype, list[int]]] = field(init=False, repr=False)
    offsets: list[int] = field(init=False, repr=False)
    last_offsets: list[int] = field(init=False, repr=False)
    size: int = field(init=False)

    def __post_init__(self) -> None:
        assert self.dtype in STATES
        keys = [place.key for place in self.places]
        assert len(set(keys)) == len(keys), "a sample key occurs twice"
        offsets = [0, *accumulate(place.tokens for place in self.places)]
        last_offsets = [0, *accumulate(place.kept for place in self.places)]
        entries, end = _entries(len(keys), offsets[-1], last_offsets[-1], self.hidden, self.dtype)
        text = json.dumps(
            {"__metadata__": {"format": FORMAT, "keys": json.dumps(keys)}, **entries}, separators=(",", ":")
        ).encode()
        text += b" " * (-len(text) % ALIGNMENT)
        header = len(text).to_bytes(8, "little") + text
        tensors = {
            name: (len(header) + entry["data_offsets"][0], DTYPES[entry["dtype"]], entry["shape"])
            for name, entry in entries.items()
        }
        for name, value in (
            ("header", header),
            ("tensors", tensors),
            ("offsets", offsets),
            ("last_offsets", last_offsets),
            ("size", len(header) + end),
        ):
            object.__setattr__(self, name, value)

    @property
    def head(self) -> int:
        """Bytes before the first sample's."""
        return self.tensors["input_ids"][0]

    def digest_at(self, index: int) -> int:
        """First byte of a sample's digest."""
        return self.tensors["digests"][0] + DIGEST * index

    def rows(self, name: str, index: int) -> slice:
        """A sample's rows of a tensor."""
        offsets = self.last_offsets if name.startswith("last") else self.offsets
        return slice(offsets[index], offsets[index + 1])

    def span(self, name: str, index: int) -> tuple[int, int]:
        """First byte and number of bytes of a sample's part of a tensor."""
        first, dtype, shape = self.tensors[name]
        rows = self.rows(name, index)
        row = dtype.itemsize * (shape[1] if len(shape) == 2 else 1)
        return first + rows.start * row, (rows.stop - rows.start) * row

    def allocate(self, pin: bool) -> dict[str, torch.Tensor]:
        """Columns for all samples, uninitialised, in host memory; `pin`: page-locked."""
        return {
            name: torch.empty(shape, dtype=dtype, pin_memory=pin)
            for name, (_, dtype, shape) in self.tensors.items()
            if name in self.columns
        }

    @property
    def columns(self) -> list[str]:
        """The tensors that samples have parts of, in file order."""
        return list(self.tensors)[3:]


def parse(header: bytes) -> tuple[list[str], dict[str, Any]]:
    """Keys and tensors' part of a header's JSON. Raises ValueError, KeyError, TypeError or AttributeError where it is
    none of a shard; ValueError(FORMAT, version) where it is one of another format."""
    entries = json.loads(header)
    metadata = entries.pop("__metadata__")
    if metadata["format"] != FORMAT:
        raise ValueError(FORMAT, metadata["format"])
    keys = json.loads(metadata["keys"])
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
        raise ValueError("keys are no list of texts")
    return keys, entries


def _entries(
    samples: int, tokens: int, kept: int, hidden: int, dtype: torch.dtype
) -> tuple[dict[str, dict[str, Any]], int]:
    """The tensors' part of the header, and where the last one ends."""
    scales = [
        ("aux_scale", torch.float32, [tokens, 3]),
        ("last_scale", torch.float32, [kept, 1]),
    ]
    entries: dict[str, dict[str, Any]] = {}
    start = 0
    for name, kind, shape in (
        ("offsets", torch.int64, [samples + 1]),
        ("last_offsets", torch.int64, [samples + 1]),
        ("digests", torch.uint8, [samples, DIGEST]),
        ("input_ids", torch.int32, [tokens]),
        ("argmax", torch.int32, [tokens]),
        *(scales if dtype == FP8 else []),
        ("aux", dtype, [tokens, 3 * hidden]),
        ("last", dtype, [kept, hidden]),
        ("loss_mask", torch.uint8, [tokens]),
    ):
        end = start + kind.itemsize * shape[0] * (shape[1] if len(shape) == 2 else 1)
        entries[name] = {"dtype": NAMES[kind], "shape": shape, "data_offsets": [start, end]}
        start = end
    return entries, start
