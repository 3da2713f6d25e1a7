"""Digests: the names of contents.

xxh3-128 in hexadecimal everywhere. They tell equal from changed or damaged; they are no protection against an attacker.
"""

import json
from pathlib import Path
from typing import Any

import xxhash

CHUNK = 1 << 22
HEADER_LIMIT = 100 << 20
TAIL_BYTES, BLOCKS, BLOCK_BYTES = 64 << 10, 16, 4 << 10


def digest_bytes(data: bytes | memoryview) -> str:
    """Digest of `data`: 32 hexadecimal characters."""
    return xxhash.xxh3_128_hexdigest(data)


def digest_json(value: Any) -> str:
    """Digest of a JSON value; the order of keys does not matter."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return digest_bytes(text.encode())


def digest_file(path: Path) -> str:
    """Digest of a file's content, read in pieces of 4 MiB."""
    state = xxhash.xxh3_128()
    with path.open("rb") as file:
        while piece := file.read(CHUNK):
            state.update(piece)
    return state.hexdigest()


def digest_sampled(path: Path) -> str:
    """Digest of a safetensors file without reading its weights: size, header, the end, and blocks spread over the file.

    Tells models of one shape apart as soon as their weights differ nearly everywhere, as after a fine-tune; a change of
    a few bytes may escape it. A file that is no safetensors file has a digest too. Raises OSError.
    """
    size = path.stat().st_size
    state = xxhash.xxh3_128(size.to_bytes(8, "little"))
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        state.update(file.read(length) if length <= HEADER_LIMIT else b"")
        blocks = [(max(0, size - BLOCK_BYTES) * number // (BLOCKS - 1), BLOCK_BYTES) for number in range(BLOCKS)]
        for start, count in [*blocks, (max(0, size - TAIL_BYTES), TAIL_BYTES)]:
            file.seek(start)
            state.update(file.read(count))
    return state.hexdigest()
