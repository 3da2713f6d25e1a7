"""End a run: its runner, and whatever a runner that was killed left behind."""

import contextlib
import os
import signal
import time
from pathlib import Path

from eyas.errors import UserError
from eyas.run import lock, process

PATIENCE_SECONDS = 60.0


def stop(folder: Path) -> list[str]:
    """End everything that works in a run folder on this machine; returns the names of what was ended.

    Finished outputs and checkpoints are kept. Raises UserError: the runner is on another machine, or does not end.
    """
    owner, ended = lock.owner(folder), []
    if process.alive(owner):
        ended.append("runner")
        os.kill(owner["pid"], signal.SIGTERM)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while process.alive(owner):
            if time.monotonic() > deadline:
                raise UserError(f"process {owner['pid']}, the runner of {folder}, does not end: kill -9 {owner['pid']}")
            time.sleep(0.1)
    left = []
    for path in sorted(found for kind in ("steps", "services") for found in (folder / kind).glob("*/*")):
        with contextlib.suppress(OSError):
            if child := process.attach(path):
                left.append(child)
                ended.append(path.parent.name)
    process.end(left)
    return ended
