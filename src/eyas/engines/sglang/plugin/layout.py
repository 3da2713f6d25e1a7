"""The capture file, written in place: its size is known from the token count, so any chunk can be written at once."""

import json
import os
from pathlib import Path

import torch

from eyas.engines.sglang.plugin.protocol import FORMAT, Wanted

NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
ALIGNMENT = 64


class CaptureFile:
    """An unfinished capture file. `write` may be called from several threads at once; OSError passes through.

    `layers`: three hidden_states indices; `hidden`: width of a state.
    """

    def __init__(self, path: Path, wanted: Wanted, layers: "tuple[int, ...]", hidden: int, dtype: torch.dtype) -> None:
        tokens, state = wanted.tokens, hidden * dtype.itemsize
        columns = (
            ("aux", NAMES[dtype], [tokens, len(layers) * hidden], len(layers) * state),
            ("last", NAMES[dtype], [tokens, hidden], state),
            ("ids", "I32", [tokens], 4),
        )
        start, entries = 0, {}
        self._rows = {}
        for name, kind, shape, row in columns:
            entries[name] = {"dtype": kind, "shape": shape, "data_offsets": [start, start + tokens * row]}
            self._rows[name] = (start, row)
            start += tokens * row
        metadata = {"format": FORMAT, "rid": wanted.rid, "layers": json.dumps(list(layers))}
        header = json.dumps({"__metadata__": metadata, **entries}, separators=(",", ":")).encode()
        header += b" " * (-(len(header) + 8) % ALIGNMENT)
        self._header = len(header).to_bytes(8, "little") + header
        self._path = path
        path.unlink(missing_ok=True)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)

    def write(self, name: str, row: int, data: memoryview) -> None:
        """Write the rows of `aux`, `last` or `ids` that begin with number `row`; the header comes with the first."""
        start, size = self._rows[name]
        if row == 0:
            self._write(0, memoryview(self._header))
        self._write(len(self._header) + start + row * size, data)

    def finish(self, path: Path) -> None:
        """Give it its name: it appears whole. It stays open where that fails, for `abandon`."""
        self._path.replace(path)
        os.close(self._file)

    def abandon(self) -> None:
        """Close it, and remove it unless another attempt has taken its place."""
        mine = os.fstat(self._file).st_ino
        os.close(self._file)
        try:
            if self._path.stat().st_ino == mine:
                self._path.unlink()
        except FileNotFoundError:
            pass

    def _write(self, offset: int, data: memoryview) -> None:
        while data:
            written = os.pwrite(self._file, data, offset)
            data, offset = data[written:], offset + written
