"""A real OpenSSH server on loopback, run by who runs the tests, and a proxy in front of it that cuts and delays."""

import contextlib
import os
import pwd
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from eyas.hosts import record

TOOLS = Path(__file__).parents[2] / ".venv-ssh"
LIBRARIES = ":".join(str(path) for path in TOOLS.glob("usr/lib/*-linux-gnu"))


def tool(name: str) -> str | None:
    """A program of the tools' folder, else of the system."""
    found = shutil.which(name, path=f"{TOOLS}/usr/bin:{TOOLS}/usr/sbin")
    return found or shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin")


def wrapped_rsync(folder: Path) -> Path | None:
    """A folder with an rsync that finds its libraries; None where there is no rsync."""
    program = tool("rsync")
    if program is None:
        return None
    folder.mkdir(exist_ok=True)
    text = f'#!/bin/sh\nLD_LIBRARY_PATH={shlex.quote(LIBRARIES)} exec {shlex.quote(program)} "$@"\n'
    (folder / "rsync").write_text(text)
    (folder / "rsync").chmod(0o755)
    return folder


class Server:
    """An sshd on a port of its own, with a host key, a user key and a client configuration made for it."""

    def __init__(self, folder: Path) -> None:
        program = tool("sshd")
        if program is None or shutil.which("ssh") is None:
            pytest.skip("needs an OpenSSH server and client: `make .venv-ssh/.ready`")
        self.folder, self.program = folder, program
        self.port = free_port()
        for name in ("host_key", "user_key"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
        (folder / "authorized").write_text((folder / "user_key.pub").read_text())
        self.bin = wrapped_rsync(folder / "bin")
        self.environment = {
            "PATH": f"{self.bin}:/usr/local/bin:/usr/bin:/bin" if self.bin else "/usr/local/bin:/usr/bin:/bin",
            "PYTHONPATH": str(Path(__file__).parents[1]),
            "XDG_STATE_HOME": str(folder / "state"),
            "OMP_NUM_THREADS": "1",
        }
        self.configure()
        self.process: subprocess.Popen[bytes] | None = None

    def configure(self, **more: str) -> None:
        """Write sshd's configuration."""
        lines = {
            "ListenAddress": "127.0.0.1", "Port": str(self.port), "HostKey": str(self.folder / "host_key"),
            "AuthorizedKeysFile": str(self.folder / "authorized"), "PidFile": "none", "UsePAM": "no",
            "StrictModes": "no", "PasswordAuthentication": "no", "KbdInteractiveAuthentication": "no",
            "PermitRootLogin": "yes", "MaxStartups": "100", "MaxSessions": "50", "LogLevel": "ERROR",
            "SetEnv": " ".join(f'"{name}={value}"' for name, value in self.environment.items()), **more,
        }  # fmt: skip
        (self.folder / "sshd_config").write_text("".join(f"{name} {value}\n" for name, value in lines.items()))

    def start(self) -> None:
        """Start it and wait until it answers."""
        command = [self.program, "-D", "-e", "-f", str(self.folder / "sshd_config")]
        if os.getuid() == 0:
            command = ["unshare", "--mount", "sh", "-c", self._as_root(), "sshd", *command]
        with (self.folder / "sshd.log").open("ab") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={"PATH": os.environ["PATH"], "LD_LIBRARY_PATH": LIBRARIES},
            )
        until = time.monotonic() + 10
        while time.monotonic() < until:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
                return
            if self.process.poll() is not None:
                break
            time.sleep(0.02)
        pytest.skip(f"no sshd can be started here: {(self.folder / 'sshd.log').read_text()[-300:]}")

    def _as_root(self) -> str:
        """sshd of root wants a user and a folder for its unprivileged half: both are only in its mount namespace."""
        passwd = self.folder / "passwd"
        text = Path("/etc/passwd").read_text()
        if "\nsshd:" not in text:
            text += "sshd:x:65533:65534::/nonexistent:/usr/sbin/nologin\n"
        passwd.write_text(text)
        return (
            f"mount --bind {shlex.quote(str(passwd))} /etc/passwd && "
            'mkdir -p /run/sshd && mount -t tmpfs -o mode=0755 none /run/sshd && exec "$@"'
        )

    def stop(self, connections: bool = True) -> None:
        """End it; its connections too, unless told otherwise."""
        if self.process is not None:
            if connections:
                for pid in descendants(self.process.pid):
                    if "sshd" in _name(pid):
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(pid, signal.SIGKILL)
            self.process.kill()
            self.process.wait()
            self.process = None

    def client(self, port: int | None = None, known: bool = True, key: str = "user_key", name: str = "config") -> Path:
        """A client's configuration, in which the server is called `box`."""
        port = port or self.port
        if known:
            public = (self.folder / "host_key.pub").read_text()
            (self.folder / f"known.{name}").write_text(f"[127.0.0.1]:{port} {public}")
        path = self.folder / name
        path.write_text(
            f"Host box\n HostName 127.0.0.1\n Port {port}\n User {pwd.getpwuid(os.getuid()).pw_name}\n"
            f" IdentityFile {self.folder / key}\n IdentitiesOnly yes\n"
            f" UserKnownHostsFile {self.folder / f'known.{name}'}\n"
            " GlobalKnownHostsFile /dev/null\n"
        )
        return path

    def host(self, root: Path, config: Path | None = None, **more: object) -> record.Host:
        """Settings of a host that is this server, saved as `box`."""
        values = {
            "name": "box", "ssh": "box", "root": str(root), "python": sys.executable, "lasting": False,
            "ssh_config": str(config or self.client()), "alive_seconds": 5, "connect_seconds": 10, **more,
        }  # fmt: skip
        made = record.make(values, "test")
        record.save(made)
        return made


def free_port() -> int:
    """A port that is free now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def _name(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text()
    return ""


def descendants(pid: int) -> list[int]:
    """All processes below one, by the kernel's account of parents."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            children.setdefault(int(fields[1]), []).append(int(path.parent.name))
    found, todo = [], [pid]
    while todo:
        new = children.get(todo.pop(), [])
        found += new
        todo += new
    return found


def working_under(root: Path) -> dict[int, str]:
    """Processes that work in a folder, or whose command line or environment names it."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            line = (path / "cmdline").read_bytes()
            about = line + (path / "environ").read_bytes() + bytes((path / "cwd").readlink())
            if line and str(root).encode() in about and int(path.name) != os.getpid():
                found[int(path.name)] = line.replace(b"\0", b" ").decode()
    return found


class Proxy:
    """TCP in front of a server; `cut` breaks all connections, `silent` lets nothing pass, `delay` slows."""

    def __init__(self, target: int) -> None:
        self.target, self.delay, self.silent = target, 0.0, False
        self.bytes_a_second: float | None = None
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self.listening.getsockname()[1]
        self.pairs: list[tuple[socket.socket, socket.socket]] = []
        self.made = 0
        self._over = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self.listening.accept()
            except OSError:  # It is over.
                return
            try:
                far = socket.create_connection(("127.0.0.1", self.target), 2)
            except OSError:
                near.close()
                continue
            self.made += 1
            self.pairs.append((near, far))
            for one, other in ((near, far), (far, near)):
                threading.Thread(target=self._pump, args=(one, other), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError):
            while data := source.recv(1 << 16):
                while self.silent and not self._over.is_set():
                    time.sleep(0.02)
                if self.bytes_a_second:
                    time.sleep(len(data) / self.bytes_a_second)
                time.sleep(self.delay)
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def cut(self) -> None:
        """Break every connection, as a network that goes away."""
        pairs, self.pairs = self.pairs, []
        for pair in pairs:
            for end in pair:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
                end.close()

    def close(self) -> None:
        """End it."""
        self._over.set()
        self.listening.shutdown(socket.SHUT_RDWR)
        self.listening.close()
        self.cut()
