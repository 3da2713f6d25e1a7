"""A real sshd for the tests of this folder, one a session, and a clean place for each test."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from loopback import Proxy, Server

from eyas.hosts.ssh import Link


@pytest.fixture(scope="session")
def sshd_of_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("sshd"))
    server.start()
    yield server
    server.stop()


@pytest.fixture
def sockets() -> Iterator[Path]:
    """A folder of the test's own for shared connections; short, since a socket's path may have some 100 bytes."""
    with tempfile.TemporaryDirectory(prefix="e", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@pytest.fixture
def server(sshd_of_session: Server, sockets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    """A running sshd; records of hosts, shared connections and the working folder are the test's own."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(sockets))
    monkeypatch.chdir(tmp_path)
    if sshd_of_session.bin:
        monkeypatch.setenv("PATH", str(sshd_of_session.bin), prepend=os.pathsep)
    if sshd_of_session.process is None:
        sshd_of_session.start()
    return sshd_of_session


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """host.root."""
    return tmp_path / "root"


@pytest.fixture
def link(server: Server, root: Path) -> Iterator[Link]:
    """A link to the server."""
    made = Link(server.host(root))
    yield made
    made.close()


@pytest.fixture
def proxy(server: Server) -> Iterator[Proxy]:
    """A proxy in front of the server."""
    made = Proxy(server.port)
    yield made
    made.close()
