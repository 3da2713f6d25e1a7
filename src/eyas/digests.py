"""Digests: the names of contents.

xxh3-128 in hexadecimal everywhere. They tell equal from changed or damaged; they are no protection against an attacker.
"""

import json
from pathlib import Path
from typing import Any

import xxhash

CHUNK = 1 << 22


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
