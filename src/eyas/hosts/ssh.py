"""The link to a host: the system's OpenSSH, with the user's own configuration, keys, agent and jump hosts.

Each call starts one interpreter there, which gets a part of `there/`, a request and perhaps a payload over its standard
input and answers with lines of JSON. So nothing of ours has to be installed there, no other version of it can answer,
and nothing but a constant is ever quoted for the shell there. All calls share one connection (a ControlMaster), where
the host allows that.
"""

import contextlib
import hashlib
import json
import os
import select
import shlex
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

from eyas.errors import UserError
from eyas.hosts.record import Host
from eyas.run.protocol import printable

BOOT = "import sys;b=sys.stdin.buffer;exec(compile(b.read(int(b.readline())),'eyas-far','exec'))"
MARK = b"eyas:"
PERSIST_SECONDS = 120
PULSE_SECONDS = 5.0
T = TypeVar("T")
FIRST_TRIES = 3
LONGEST_WAIT_SECONDS = 30.0
SOCKET_LIMIT = 80
"""Of 104 bytes that a socket's path may have; ssh adds 17 while it makes one."""


class LinkLost(Exception):  # noqa: N818
    """The connection broke, or none could be made: what happens there is unknown."""


class Link:
    """Calls to one host."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.ssh = [*program(host), *_options(host)]
        """The command line of ssh, but for the destination."""

    def call(self, do: str, payload: Iterable[bytes] = (), **request: Any) -> dict[str, Any]:
        """Do one thing there (`part.function` of `there/`) and return its answer.

        Raises LinkLost, or UserError: the host is not to be used as it is, or what runs there refused.
        """
        with contextlib.closing(self.stream(do, payload, **request)) as answers:
            return next(answers)

    def stream(self, do: str, payload: Iterable[bytes] = (), **request: Any) -> Generator[dict[str, Any], None, None]:
        """What a longer call says, until it is done. A sign of life goes there every few seconds."""
        command = [*self.ssh, self.host.ssh, remote_command(self.host.python or "python3")]
        part, _, do = do.partition(".")
        sources = [resources.files("eyas.hosts.there").joinpath(f"{name}.py").read_bytes() for name in ("base", part)]
        about = {"part": part, "do": do, "root": self.host.root, "lasting": self.host.lasting}
        with tempfile.TemporaryFile() as errors:
            process = subprocess.Popen(
                command, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, start_new_session=True
            )
            try:
                with contextlib.suppress(BrokenPipeError):  # Its end says why.
                    for source in sources:
                        _write(process, b"%d\n" % len(source) + source)
                    _write(process, json.dumps({**about, **request}).encode() + b"\n")
                    for piece in payload:
                        _write(process, piece)
                answered = False
                for answer in _answers(process):
                    answered = True
                    if "refused" in answer:
                        raise UserError(f"{self.host.name}: {answer['refused']}")
                    last = answer.pop("last", False)
                    yield answer
                    if last:
                        return
                code = process.wait()
                errors.seek(0)
                if answered:
                    raise LinkLost("closed early")
                raise fault(self.host, code, errors.read().decode(errors="replace"))
            finally:
                process.terminate()
                process.wait()
                for pipe in (process.stdin, process.stdout):
                    assert pipe is not None
                    pipe.close()

    def first_call(self, do: str, **request: Any) -> dict[str, Any]:
        """The first call of a command: a host that cannot be reached is a UserError."""
        for left in range(FIRST_TRIES - 1, -1, -1):
            try:
                return self.call(do, **request)
            except LinkLost as lost:
                if not left or "refused" in str(lost) or "resolve" in str(lost):
                    raise UserError(f"{self.host.name} cannot be reached: {lost}") from lost
                time.sleep(1)
        raise AssertionError

    def close(self) -> None:
        """End the shared connection; a command that still uses it has its own end of it."""
        if self.host.multiplex:
            command = [*self.ssh, "-O", "exit", self.host.ssh]
            subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)


def _write(process: "subprocess.Popen[bytes]", data: bytes) -> None:
    assert process.stdin is not None
    view = memoryview(data)
    while view:
        view = view[process.stdin.write(view) or 0 :]


def _answers(process: "subprocess.Popen[bytes]") -> Iterator[dict[str, Any]]:
    """The lines of JSON among what a process says; all else is the chatter of login scripts."""
    assert process.stdout is not None
    output, said, pulse = process.stdout.fileno(), b"", time.monotonic() + PULSE_SECONDS
    while True:
        if select.select([output], [], [], PULSE_SECONDS)[0]:
            new = os.read(output, 1 << 16)
            if not new:
                return
            said += new
        if time.monotonic() > pulse:
            pulse = time.monotonic() + PULSE_SECONDS
            with contextlib.suppress(BrokenPipeError):
                _write(process, b"\n")
        *lines, said = said.split(b"\n")
        yield from (json.loads(line[len(MARK) :]) for line in lines if line.startswith(MARK))


def remote_command(python: str) -> str:
    """What the shell there is told: one interpreter, which reads all else from its standard input."""
    home = python.startswith("~/")  # Only outside of quotes is it the home folder.
    quoted = "~/" + shlex.quote(python[2:]) if home else shlex.quote(python)
    return f"exec {quoted} -IS -c {shlex.quote(BOOT)}"


def patiently(act: Callable[[], T], say: Callable[[str], None]) -> T:
    """Do something that may be done again, until the connection holds; waits longer and longer in between."""
    wait = 1.0
    while True:
        try:
            return act()
        except LinkLost as lost:
            say(f"connection lost ({lost}); what runs there goes on. Trying again in {wait:.0f} s")
            time.sleep(wait)
            wait = min(2 * wait, LONGEST_WAIT_SECONDS)


def program(host: Host) -> list[str]:
    """ssh, with the configuration that the user chose."""
    return ["ssh", *(["-F", str(Path(host.ssh_config).expanduser())] if host.ssh_config else [])]


def _options(host: Host) -> list[str]:
    options = {
        "BatchMode": "yes",
        "StrictHostKeyChecking": "yes",
        "ConnectTimeout": str(host.connect_seconds),
        "ServerAliveInterval": str(host.alive_seconds),
        "ServerAliveCountMax": "3",
        "ControlMaster": "auto" if host.multiplex else "no",
        "ControlPath": str(control_path(host)) if host.multiplex else "none",
        "ControlPersist": str(PERSIST_SECONDS) if host.multiplex else "no",
        "ForwardX11": "no",
        "ForwardAgent": "no",
        "ClearAllForwardings": "yes",
        "RequestTTY": "no",
        "RemoteCommand": "none",
        "LogLevel": "ERROR",
    }
    return [part for name, value in options.items() for part in ("-o", f"{name}={value}")]


def control_path(host: Host) -> Path:
    """Socket of the shared connection, in a folder that only the user can enter. Raises UserError."""
    key = hashlib.sha256(repr((host.ssh, host.ssh_config, host.alive_seconds)).encode()).hexdigest()[:12]
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    folder = Path(runtime) / "eyas" if runtime else Path(tempfile.gettempdir()) / f"eyas-{os.getuid()}"
    if len(os.fsencode(folder / key)) > SOCKET_LIMIT:
        folder = Path("/tmp") / f"eyas-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    there = folder.lstat()
    if not stat.S_ISDIR(there.st_mode) or there.st_uid != os.getuid() or there.st_mode & 0o077:
        raise UserError(f"{folder} belongs to somebody else or is open to others: delete it, or set XDG_RUNTIME_DIR")
    return folder / key


def fault(host: Host, code: int, text: str) -> Exception:
    """What went wrong, from ssh's exit code and the text on its standard error: a UserError or LinkLost."""
    name = host.name
    last = printable(next((line for line in reversed(text.splitlines()) if line.strip()), ""))
    if "REMOTE HOST IDENTIFICATION HAS CHANGED" in text or "host key has changed" in text.lower():
        return UserError(
            f"{name}: its host key has changed: it was set up anew, or another machine answers in its place. Ask who "
            f"runs it; `eyas host trust {name}` shows the new key's fingerprint and takes it on your word"
        )
    if "Host key verification failed" in text or "host key is known for" in text:
        return UserError(
            f"{name}: its host key is not known: `eyas host trust {name}` shows its fingerprint and takes it on your "
            "word"
        )
    if "Permission denied (" in text or "Too many authentication failures" in text:
        return UserError(
            f"{name}: refuses this user or key ({last}): `ssh {host.ssh}` has to work without a password; see "
            "IdentityFile in ssh's configuration, or ssh-add"
        )
    if "Bad configuration option" in text or "Can't open user config file" in text:
        return UserError(f"{name}: ssh's configuration is not valid: {last}")
    python = host.python or "python3"
    if code == 127 or (code == 126 and "ermission" in text):
        remedy = "correct host.python" if host.python else "install Python 3.11 there, or name one by --python"
        return UserError(f"{name}: has no {python} ({last}): {remedy}")
    if code not in (255, -1) and code >= 0:
        if "Traceback" in text:
            return RuntimeError(f"{name}: {last}")
        return UserError(
            f"{name}: gives no shell ({last or f'exit code {code}'}): eyas needs an account that may run commands"
        )
    return LinkLost(last or "closed")
