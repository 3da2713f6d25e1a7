"""One runner a folder."""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from eyas.errors import UserError
from eyas.run import process


@contextlib.contextmanager
def hold(folder: Path) -> Iterator[None]:
    """Own a run folder for the time of a `with`. Raises UserError naming the runner that owns it already."""
    path = folder / "lock"
    handle = process.try_lock(path)
    if handle is None:
        other = owner(folder)
        pid, host = other.get("pid", "?"), other.get("host", "?")
        raise UserError(
            f"{folder} is being run by process {pid} on {host}: watch it with `eyas status {folder}`, "
            f"or end it there (kill {pid}) and run the same command again"
        )
    try:
        os.ftruncate(handle, 0)
        os.write(handle, json.dumps(process.identity(os.getpid())).encode())
        yield
    finally:
        os.close(handle)


def owner(folder: Path) -> dict[str, Any]:
    """Who owns the folder, or did last; empty when unknown."""
    return process.read_identity(folder / "lock")
