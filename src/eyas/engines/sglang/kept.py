"""This side of `keeper.py`: a server in a keeper's care, and what an earlier keeper could not end."""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from eyas.engines.sglang import keeper
from eyas.errors import UserError

MARK = "EYAS_SERVER"
"""Environment variable of a server's processes: by it the next start finds what a killed keeper left."""
GRACE_SECONDS = 2.5
"""Between SIGTERM and SIGKILL; the runner grants a service five seconds in all."""


@dataclass
class Kept:
    """A server and its keeper, who ends as soon as all of the server has."""

    pid: int
    _keeper: "subprocess.Popen[bytes]" = field(repr=False)

    def alive(self) -> bool:
        """Whether the server's main process runs."""
        return self._keeper.poll() is None

    def wait(self) -> int:
        """The server's exit code, once all of it has ended; 128 + n: by signal n."""
        return self._keeper.wait()

    def end(self) -> None:
        """End all of the server."""
        assert self._keeper.stdin is not None
        assert self._keeper.stdout is not None
        with contextlib.suppress(OSError):
            self._keeper.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._keeper.wait(keeper.GIVE_UP_SECONDS + 5)
        self._keeper.stdout.close()


def start(line: list[str], env: dict[str, str], log: Path, scratch: Path | None, lock: int) -> Kept:
    """Start a command whose output goes into `log`. Its keeper holds the `lock` and removes `scratch` at the end.

    Raises UserError: the interpreter is not there.
    """
    python = shutil.which(line[0], path=env.get("PATH"))
    if python is None:
        raise UserError(f"server.python: {line[0]} is not there or cannot be run: name the interpreter that has SGLang")
    orders = {
        "command": [python, *line[1:]],
        "env": env,
        "log": str(log.absolute()),
        "scratch": str(scratch) if scratch else None,
        "grace": GRACE_SECONDS,
    }
    popen = subprocess.Popen(
        [sys.executable, "-I", keeper.__file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
        pass_fds=(lock,),
    )
    assert popen.stdin is not None
    assert popen.stdout is not None
    with contextlib.suppress(BrokenPipeError):
        popen.stdin.write(json.dumps(orders).encode() + b"\n")
        popen.stdin.flush()
    said = json.loads(popen.stdout.readline() or b'{"error": "its keeper did not start"}')
    kept = Kept(int(said.get("pid", 0)), popen)
    if "error" in said:
        kept.end()
        raise UserError(f"server.python: cannot start the server ({said['error']})")
    return kept


def mark_of(folder: Path) -> str:
    """The mark of the server that works in `folder`."""
    return hashlib.sha256(str(folder.absolute()).encode()).hexdigest()[:16]


def end_earlier(lock: int, mark: str, folder: Path) -> None:
    """Take the folder's lock; ends what an earlier server of this folder left. Raises UserError: it does not go."""
    deadline = time.monotonic() + keeper.GIVE_UP_SECONDS
    while time.monotonic() < deadline:
        left = marked(mark)
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        if not left:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
        time.sleep(0.05)
    raise UserError(f"{folder}: an earlier server does not end (processes {marked(mark)}): end it and try again")


def marked(mark: str) -> list[int]:
    """Processes of the server with this mark, and all below them."""
    wanted, found = f"{MARK}={mark}\0".encode(), []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if wanted in path.read_bytes():
                found.append(int(path.parent.name))
    return sorted({*found, *(below for pid in found for below in keeper.descendants(pid))})
