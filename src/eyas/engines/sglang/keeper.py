"""Stands between eyas and a server, so that no process of the server outlives the one that started it.

A program of its own, in a session of its own, standard library only: `python -I keeper.py`. The first line on its
standard input is a JSON object: `command`, `env` (the server's whole environment), `log` (file), `scratch` (a folder to
remove at the end, or null), `grace` (seconds). It answers with a line, `{"pid": …}` or `{"error": …}`. When its input
ends, which it does however the starter dies, or when the server itself ends, it ends all that is left: SIGTERM, after
`grace` seconds SIGKILL to every descendant. Those that left the session, or whose parent died, are descendants all the
same, since the kernel hands orphans to this process. Its exit code is the server's, 128 + n for signal n.
"""

import contextlib
import ctypes
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

SET_PDEATHSIG, SET_CHILD_SUBREAPER = 1, 36
TICK_SECONDS = 0.1
TRACKER_SECONDS = 1.0
GIVE_UP_SECONDS = 60.0


def main() -> int:
    """Start, watch, sweep."""
    starter = os.getppid()
    orders = json.loads(_first_line())
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _hang_up)
    try:
        with Path(orders["log"]).open("ab") as log:
            server = subprocess.Popen(
                orders["command"],
                env=orders["env"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=lambda: libc.prctl(SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0),
            )
    except OSError as error:
        _say(error=f"{orders['command'][0]}: {error.strerror}")
        return 127
    _say(pid=server.pid)
    code = None
    while code is None and not _let_go(starter):
        code = _reap(server.pid)
    code = _sweep(server.pid, orders["grace"], code)
    if orders["scratch"]:
        shutil.rmtree(orders["scratch"], ignore_errors=True)
    return code if code is not None and code >= 0 else 128 - (code or 0)


def _first_line() -> bytes:
    line = b""
    while not line.endswith(b"\n") and (piece := os.read(0, 65536)):
        line += piece
    return line


def _say(**what: object) -> None:
    with contextlib.suppress(OSError):
        os.write(1, json.dumps(what).encode() + b"\n")


def _hang_up(*_: object) -> None:
    with contextlib.suppress(OSError):
        os.close(0)


def _let_go(starter: int) -> bool:
    """Wait a moment; whether the starter has closed its end or died."""
    try:
        readable = select.select([0], [], [], TICK_SECONDS)[0]
        return bool(readable) or os.getppid() != starter
    except (OSError, ValueError):
        return True


def _reap(pid: int) -> int | None:
    """Take in ended children; the exit code of `pid` if it is among them (negative: a signal)."""
    code = None
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == pid:
                code = os.waitstatus_to_exitcode(ended[1])
    return code


def _sweep(pid: int, grace: float, code: int | None) -> int | None:
    """End the server and all its descendants; its exit code."""
    begun = time.monotonic()
    left = descendants(os.getpid())
    _signal(left, signal.SIGTERM)
    while left and time.monotonic() < begun + GIVE_UP_SECONDS:
        time.sleep(TICK_SECONDS / 4)
        ended = _reap(pid)
        code = ended if code is None else code
        left = descendants(os.getpid())
        if time.monotonic() > begun + grace + TRACKER_SECONDS:
            _signal(left, signal.SIGKILL)
        elif time.monotonic() > begun + grace:
            _signal([other for other in left if not _is_tracker(other)], signal.SIGKILL)
    return code


def _is_tracker(pid: int) -> bool:
    """Whether a process is Python's resource tracker, which removes shared memory once the others have gone."""
    try:
        return b"resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _signal(pids: list[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, number)


def descendants(of: int) -> list[int]:
    """All processes below `of`; zombies count until they are reaped."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError):
            children.setdefault(int(stat.read_text().rpartition(")")[2].split()[1]), []).append(int(stat.parent.name))
    found: list[int] = []
    todo = [of]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


if __name__ == "__main__":
    sys.exit(main())
