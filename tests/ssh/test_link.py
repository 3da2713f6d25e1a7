"""The link to a real sshd: what is said when it does not work, and that it is one connection."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from loopback import Proxy, Server, free_port

from eyas.errors import UserError
from eyas.hosts import record
from eyas.hosts.ssh import Link, LinkLost, control_path, fault


def test_a_call(link: Link, root: Path) -> None:
    there = link.call("shelf.hello")
    assert there["root"] == str(root)
    assert root.stat().st_mode & 0o777 == 0o700


def test_a_root_with_a_quote_and_a_space(server: Server, tmp_path: Path) -> None:
    strange = tmp_path / "a 'b' $(touch owned) \"c\" é"
    there = Link(server.host(strange)).call("shelf.hello")
    assert there["root"] == str(strange)
    assert strange.is_dir()
    assert not (Path.home() / "owned").exists()


def test_an_interpreter_with_a_space_in_its_path(server: Server, root: Path, tmp_path: Path) -> None:
    (tmp_path / "it's a").symlink_to(os.path.realpath(sys.executable))
    assert Link(server.host(root, python=str(tmp_path / "it's a"))).call("shelf.hello")["root"] == str(root)


def test_one_connection_serves_all_calls(proxy: Proxy, server: Server, root: Path) -> None:
    link = Link(server.host(root, server.client(proxy.port)))
    for _ in range(3):
        link.call("shelf.hello")
    assert proxy.made == 1
    link.close()
    link.call("shelf.hello")
    assert proxy.made == 2
    link.close()
    until = time.monotonic() + 10  # The master takes its leave by itself.
    while control_path(link.host).exists():
        assert time.monotonic() < until
        time.sleep(0.05)


def test_a_host_that_allows_no_sharing(proxy: Proxy, server: Server, root: Path) -> None:
    link = Link(server.host(root, server.client(proxy.port), multiplex=False))
    for _ in range(2):
        link.call("shelf.hello")
    assert proxy.made == 2


def test_a_killed_master_is_made_anew(link: Link) -> None:
    link.call("shelf.hello")
    text = subprocess.run([*link.ssh, "-O", "check", "box"], capture_output=True, text=True, check=True).stderr
    os.kill(int(text.partition("pid=")[2].partition(")")[0]), 9)
    assert link.call("shelf.hello")
    link.close()


def test_an_unknown_host_key(server: Server, root: Path) -> None:
    link = Link(server.host(root, server.client(known=False, name="unknown")))
    with pytest.raises(UserError, match=r"^box: its host key is not known: `eyas host trust box` shows"):
        link.first_call("shelf.hello")


def test_a_changed_host_key(server: Server, root: Path, tmp_path: Path) -> None:
    config = server.client(name="changed")
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "other"], check=True)
    (server.folder / "known.changed").write_text(f"[127.0.0.1]:{server.port} {(tmp_path / 'other.pub').read_text()}")
    with pytest.raises(UserError, match=r"^box: its host key has changed: .* `eyas host trust box`"):
        Link(server.host(root, config)).first_call("shelf.hello")


def test_a_key_that_is_not_accepted(server: Server, root: Path) -> None:
    config = server.client(key="host_key", name="wrong-key")
    with pytest.raises(UserError, match=r"^box: refuses this user or key .*`ssh box` has to work without a password"):
        Link(server.host(root, config)).first_call("shelf.hello")


def test_no_python(server: Server, root: Path) -> None:
    with pytest.raises(UserError, match=r"^box: has no /nowhere/python3 .*: correct host.python$"):
        Link(server.host(root, python="/nowhere/python3")).first_call("shelf.hello")


def test_nothing_listens(server: Server, root: Path) -> None:
    config = server.client(free_port(), name="nobody")
    with pytest.raises(UserError, match=r"^box cannot be reached: .*refused"):
        Link(server.host(root, config)).first_call("shelf.hello")


def test_no_shell(server: Server) -> None:
    host = record.make({"name": "box", "ssh": "box", "root": "/x"}, "test")
    said = fault(host, 1, "This account is currently not available.")
    assert isinstance(said, UserError)
    assert str(said).startswith("box: gives no shell (This account is currently not available.)")
    assert isinstance(fault(host, 255, "Connection closed by 1.2.3.4 port 22"), LinkLost)


def test_a_silent_connection_is_taken_as_lost(proxy: Proxy, server: Server, root: Path) -> None:
    link = Link(server.host(root, server.client(proxy.port), alive_seconds=1, connect_seconds=2))
    link.call("shelf.hello")
    proxy.silent = True
    began = time.monotonic()
    with pytest.raises(LinkLost):
        link.call("shelf.hello")
    assert time.monotonic() - began < 30
    link.close()


@pytest.mark.skipif(not os.path.ismount("/dev/shm"), reason="needs /dev/shm")
def test_a_root_that_would_be_lost_is_refused(server: Server) -> None:
    link = Link(server.host(Path("/dev/shm/eyas-test"), lasting=True))
    with pytest.raises(UserError, match=r"^box: host.root /dev/shm/eyas-test lies on tmpfs \(mounted at /dev/shm\)"):
        link.call("shelf.hello")
    assert not Path("/dev/shm/eyas-test").exists()
