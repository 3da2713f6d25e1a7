"""What captured states will take, and what is free where."""

import shutil
from pathlib import Path

ITEM = {"float32": 4, "bfloat16": 2, "fp8": 1}
"""Bytes of a number of a state."""


def token_bytes(hidden: int, kind: str) -> int:
    """Bytes of a token's states: three layers and the last one, `hidden` wide, with its ids and, in fp8, scales."""
    return 4 * hidden * ITEM[kind] + 9 + 16 * (kind == "fp8")


def free(folder: Path) -> int:
    """Bytes free on the file system on which `folder` is, or will be."""
    return shutil.disk_usage(next(place for place in (folder, *folder.absolute().parents) if place.exists())).free


def size(count: float) -> str:
    """`512 bytes`, `3.4 MiB`, `1,204.0 GiB`."""
    for unit, shift in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if count >= 1 << shift:
            return f"{count / (1 << shift):,.1f} {unit}"
    return f"{count:.0f} bytes"
