"""Child processes that outlive their runner.

A child works in a folder of its own and holds that folder's `lock` for as long as it lives: the runner takes the lock
before it starts the child and hands it over, so that at no moment a started child is unknown to a later runner. Who the
child is stands in `process.json`, written by the child as its first act: pid, kernel start time, boot, host, attempt.
"""

import contextlib
import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.errors import UserError
from eyas.files import read_json, write_json

ENVIRONMENT = {"PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
END_SECONDS = 5.0
IDENTIFY_SECONDS = 10.0


def identity(pid: int) -> dict[str, Any]:
    """Who a process is, for good: its pid alone is used again sooner or later. Raises OSError when there is none."""
    stat = Path(f"/proc/{pid}/stat").read_text()
    fields = stat.rpartition(")")[2].split()
    if fields[0] in "ZX":
        raise ProcessLookupError(errno.ESRCH, "zombie")
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return {"pid": pid, "start": int(fields[19]), "boot": boot, "host": socket.gethostname()}


def alive(who: dict[str, Any]) -> bool:
    """Whether the process of this identity still runs on this machine."""
    try:
        now = identity(int(who["pid"]))
    except (OSError, KeyError, ValueError):
        return False
    return now == {key: who.get(key) for key in now}


def try_lock(path: Path) -> int | None:
    """Take an exclusive lock and return its handle; None when another process holds it. Raises OSError."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return None
    except OSError:
        os.close(handle)
        raise
    return handle


def who_runs(folder: Path) -> dict[str, Any]:
    """Content of `process.json`; empty when there is none yet or it is damaged."""
    with contextlib.suppress(OSError, UserError):
        who = read_json(folder / "process.json")
        if isinstance(who, dict):
            return who
    return {}


@dataclass
class Child:
    """A running (or just ended) process of a step or service."""

    folder: Path
    who: dict[str, Any]
    popen: subprocess.Popen[bytes] | None = None
    """None: an earlier runner started it."""

    def running(self) -> bool:
        """Whether it still runs."""
        return self.popen.poll() is None if self.popen else alive(self.who)

    def signal(self, number: int) -> None:
        """Send a signal to its whole process group."""
        if self.popen is not None or alive(self.who):
            _signal_group(self.who["pid"], number)

    def exit(self) -> dict[str, Any]:
        """How it ended: `exit.json`, or what can be told without one (`code` negative: ended by that signal)."""
        with contextlib.suppress(OSError, UserError):
            said = read_json(self.folder / "exit.json")
            if isinstance(said, dict) and isinstance(said.get("code"), int):
                return said
        code = self.popen.returncode if self.popen else None
        if code is not None and code < 0:
            name = signal.Signals(-code).name
            hint = " (out of memory?)" if name == "SIGKILL" else ""
            said = {"code": code, "error": f"ended by {name}{hint}"}
        elif code == 2:
            said = {"code": code, "error": "could not even write exit.json: is the disk full?"}
        else:
            said = {"code": code if code else -1, "error": "ended without a word"}
        with contextlib.suppress(OSError):
            write_json(self.folder / "exit.json", said)
        return said


def start(folder: Path, name: str, *flags: str) -> Child:
    """Start `python -m eyas.step NAME` on the spec.json in `folder`, detached, its output appended to log.txt.

    The caller has found that nothing runs there (`attach` gave None). Raises OSError.
    """
    deadline = time.monotonic() + END_SECONDS
    while (lock := try_lock(folder / "lock")) is None:
        # Just killed helpers of an earlier attempt may take a moment to let go.
        assert time.monotonic() < deadline, f"{folder}: started twice"
        time.sleep(0.02)
    command = [sys.executable, "-P", "-m", "eyas.step", name, "--spec", str(folder / "spec.json"), "--out", str(folder)]
    try:
        (folder / "exit.json").unlink(missing_ok=True)
        with (folder / "log.txt").open("ab") as log:
            popen = subprocess.Popen(
                [*command, "--lock", str(lock), *flags],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=(lock,),
                env={**os.environ, **ENVIRONMENT},
            )
    finally:
        os.close(lock)
    return Child(folder, {"pid": popen.pid}, popen)


def attach(folder: Path) -> Child | None:
    """The child that an earlier runner started in `folder` and that still runs; None when nothing runs there."""
    if not (folder / "lock").exists():
        return None
    waited_until = time.monotonic() + IDENTIFY_SECONDS
    while (lock := try_lock(folder / "lock")) is None:
        who = who_runs(folder)
        if alive(who):
            return Child(folder, who)
        if time.monotonic() > waited_until:
            # The step is dead, but processes that it forked hold its lock: they belong to its group.
            if "pid" not in who:
                raise UserError(f"{folder}: something holds its lock and has not said who it is; end it and try again")
            _signal_group(who["pid"], signal.SIGKILL)
            waited_until += IDENTIFY_SECONDS
        time.sleep(0.05)
    os.close(lock)
    return None


def end(children: list[Child], patience: float = END_SECONDS) -> None:
    """End process groups: SIGTERM, and SIGKILL for those that still run after `patience` seconds."""
    for child in children:
        child.signal(signal.SIGTERM)
    deadline = time.monotonic() + patience
    while any(child.running() for child in children) and time.monotonic() < deadline:
        time.sleep(0.02)
    for child in children:
        _signal_group(child.who["pid"], signal.SIGKILL)
    while any(child.running() for child in children):
        time.sleep(0.02)


def _signal_group(pid: int, number: int) -> None:
    # The group's number stays taken for as long as one of its members lives, so it is never somebody else's here.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)
