"""One runner a folder."""

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from eyas.errors import UserError
from eyas.run import process

HANDOVER_SECONDS = 15.0


@contextlib.contextmanager
def hold(folder: Path) -> Iterator[Callable[[bool], None]]:
    """Own a run folder for the time of a `with`; gives a function that says whether services are held for the next one.

    A runner that only holds services gives them and the folder up. Raises UserError naming the runner that owns it.
    """
    path = folder / "lock"
    handle = process.try_lock(path)
    if handle is None:
        handle = _handed_over(folder)
    if handle is None:
        other = owner(folder)
        pid, host = other.get("pid", "?"), other.get("host", "?")
        raise UserError(
            f"{folder} is being run by process {pid} on {host}: watch it with `eyas watch {folder}`, "
            f"or end it there (kill {pid}) and run the same command again"
        )

    def say(holding: bool) -> None:
        content = json.dumps({**process.identity(os.getpid()), "holding": holding}).encode()
        os.ftruncate(handle, len(content))
        os.pwrite(handle, content, 0)

    try:
        say(False)
        yield say
    finally:
        os.ftruncate(handle, 0)
        os.close(handle)


def _handed_over(folder: Path) -> int | None:
    """The lock of a runner that holds services and nothing else, which it is asked for; None when it works."""
    other = owner(folder)
    if other.get("holding") is not True or not process.alive(other):
        return None
    os.kill(other["pid"], signal.SIGUSR1)
    until = time.monotonic() + HANDOVER_SECONDS
    while (handle := process.try_lock(folder / "lock")) is None and time.monotonic() < until:
        time.sleep(0.05)
    return handle


def owner(folder: Path) -> dict[str, Any]:
    """Who owns the folder, or did when it was killed; empty when nobody does."""
    return process.read_identity(folder / "lock")
