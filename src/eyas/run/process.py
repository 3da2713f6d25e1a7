"""Child processes that outlive their runner.

A child works in a folder of its own and holds that folder's `lock` for as long as it lives: the runner takes the lock
before it starts the child and hands it over, so that at no moment a started child is unknown to a later runner. Who the
child is stands in `process.json`, written by the child as its first act: pid, kernel start time, boot, host, attempt.
Before that, what an earlier attempt wrote there stands in `previous.json`: nobody may take the one for the other.
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
from eyas.run.faults import IN_A_RUN

ENVIRONMENT = {"PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
NOW, BEFORE = "process.json", "previous.json"
IDENTITY = {"pid": int, "start": int, "boot": str, "host": str}
END_SECONDS = 5.0
IDENTIFY_SECONDS = 10.0
KILLED = -signal.SIGKILL


def identity(pid: int) -> dict[str, Any]:
    """Who a process is, for good: its pid alone is used again sooner or later. Raises OSError when there is none."""
    if _stat(pid)[0] in "ZX":
        raise ProcessLookupError(errno.ESRCH, "zombie")
    return _described(pid)


def _stat(pid: int) -> list[str]:
    """Fields of the kernel's line about a process, from its state on."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _described(pid: int) -> dict[str, Any]:
    return {"pid": pid, "start": int(_stat(pid)[19]), **_here()}


def _here() -> dict[str, str]:
    """This machine since it was started last."""
    return {"boot": boot(), "host": socket.gethostname()}


def boot() -> str:
    """A name for the time since this machine was started last."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def alive(who: dict[str, Any]) -> bool:
    """Whether the process of this identity still runs on this machine."""
    try:
        now = identity(who["pid"])
    except (OSError, KeyError):
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
    return read_identity(folder / NOW)


def who_ran(folder: Path) -> dict[str, Any]:
    """What an earlier attempt wrote, as long as a new one has not said who it is."""
    return read_identity(folder / BEFORE)


def read_identity(path: Path) -> dict[str, Any]:
    """A file that says who a process is; empty when it is missing or damaged."""
    with contextlib.suppress(OSError, UserError):
        who = read_json(path)
        if isinstance(who, dict) and all(type(who.get(key)) is kind for key, kind in IDENTITY.items()):
            return who
    return {}


def how_ended(folder: Path) -> dict[str, Any]:
    """Content of `exit.json`; empty when there is none or it is damaged."""
    with contextlib.suppress(OSError, UserError):
        said = read_json(folder / "exit.json")
        if isinstance(said, dict) and type(said.get("code")) is int and isinstance(said.get("error"), str | None):
            return said
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
            _signal_group(self.who, number)

    def exit(self) -> dict[str, Any]:
        """How it ended: `exit.json`, or what can be told without one (`code` negative: ended by that signal)."""
        if said := how_ended(self.folder):
            return said
        code = self.popen.returncode if self.popen else None
        if code == KILLED:
            said = {"code": code, "error": f"killed by the system, most likely for want of memory: {IN_A_RUN}"}
        elif code is not None and code < 0:
            said = {"code": code, "error": f"ended by {signal.Signals(-code).name}"}
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
        if (folder / NOW).exists():
            (folder / NOW).replace(folder / BEFORE)
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
    return Child(folder, _described(popen.pid), popen)


def attach(folder: Path) -> Child | None:
    """The child that an earlier runner started in `folder` and that still runs; None when nothing runs there."""
    if not (folder / "lock").exists():
        return None
    waited_until, killed = time.monotonic() + IDENTIFY_SECONDS, False
    while (lock := try_lock(folder / "lock")) is None:
        who = who_runs(folder)
        if alive(who):
            return Child(folder, who)
        if time.monotonic() > waited_until:
            # The step is dead, but processes that it forked hold its lock: they belong to its group.
            if killed or not _leads_its_group(who):
                raise UserError(f"{folder}: something holds its lock and has not said who it is; end it and try again")
            _signal_group(who, signal.SIGKILL)
            waited_until, killed = waited_until + IDENTIFY_SECONDS, True
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
        _signal_group(child.who, signal.SIGKILL)
    while any(child.running() for child in children):
        time.sleep(0.02)


def _leads_its_group(who: dict[str, Any]) -> bool:
    """Whether the group of this number is that child's: it gave its number to the group, which keeps it for as long as
    a member lives, so a process of this number is the child (perhaps a zombie), or there is none any more."""
    if not who or {key: who[key] for key in ("boot", "host")} != _here():
        return False
    try:
        return bool(_described(who["pid"])["start"] == who["start"])
    except OSError:
        return True


def _signal_group(who: dict[str, Any], number: int) -> None:
    if _leads_its_group(who):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(who["pid"], number)
