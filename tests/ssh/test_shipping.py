"""What is shipped is whole and right there, or not there: stale, tampered, truncated and racing uploads."""

import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from loopback import Proxy, Server

from eyas.errors import UserError
from eyas.hosts import ship
from eyas.hosts.ssh import Link, LinkLost
from eyas.progress import Silent


def files(folder: Path, *names: str, size: int = 100) -> ship.Parcel:
    """A parcel of files with something in them."""
    for number, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(bytes([number + 1]) * size)
    return ship.parcel({name: folder / name for name in names})


def on_shelf(root: Path, kind: str, sent: ship.Parcel) -> None:
    """It is there as `sha256sum` sees it, and nothing lies beside it."""
    shelf = root / kind
    assert [path.name for path in shelf.iterdir() if path.is_dir()] == [sent.digest]
    lines = "".join(f"{sha}  {name}\n" for name, _, sha in sent.files)
    check = ["sha256sum", "--check", "--strict", "--quiet"]
    subprocess.run(check, input=lines, text=True, cwd=shelf / sent.digest, check=True)
    there = {path.relative_to(shelf / sent.digest).as_posix() for path in shelf.rglob("*") if path.is_file()
             if path.is_relative_to(shelf / sent.digest)}  # fmt: skip
    assert there == {name for name, _, _ in sent.files}


def test_the_archive_depends_on_the_content_alone(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    one = files(first, "x.py", "p/y.py", size=5000)
    (first / "x.py").touch()
    (first / "x.py").chmod(0o755)
    other = files(second, "x.py", "p/y.py", size=5000)
    assert one.digest == other.digest
    assert b"".join(one.tar()) == b"".join(other.tar())
    (second / "x.py").write_text("changed")
    assert ship.parcel({"x.py": second / "x.py", "p/y.py": second / "p/y.py"}).digest != one.digest


def test_our_code_holds_all_that_it_needs() -> None:
    sent = ship.code()
    names = {name for name, _, _ in sent.files}
    assert {"eyas/cli.py", "eyas/hosts/there/base.py", "eyas/hosts/ssh.py"} <= names
    assert not any("__pycache__" in name for name in names)


def test_code_goes_once(link: Link, root: Path, tmp_path: Path) -> None:
    sent = files(tmp_path / "src", "eyas/a.py", "eyas/b/c.py")
    assert ship.send_code(link, sent)
    on_shelf(root, "code", sent)
    assert not ship.send_code(link, sent)


@pytest.mark.parametrize("damage", ["edited", "added", "compiled", "gone"])
def test_tampered_code_is_never_run(link: Link, root: Path, tmp_path: Path, damage: str) -> None:
    sent = files(tmp_path / "src", "eyas/a.py", "eyas/b/c.py")
    ship.send_code(link, sent)
    there = root / "code" / sent.digest / "eyas"
    if damage == "edited":
        (there / "a.py").chmod(0o600)
        (there / "a.py").write_text("import os")
    elif damage == "added":
        (there / "torch.py").write_text("import os")
    elif damage == "compiled":
        (there / "__pycache__").mkdir()
        (there / "__pycache__" / "a.cpython-311.pyc").write_bytes(b"x")
    else:
        (there / "a.py").unlink()
    job = {"code": sent.digest, "command": ["touch", str(tmp_path / "ran")]}
    with pytest.raises(UserError, match="is not what was shipped; run the same command again"):
        link.call("runners.start", name="x", job=job)
    assert not (tmp_path / "ran").exists()
    assert ship.send_code(link, sent)  # Sent anew.
    on_shelf(root, "code", sent)
    assert link.call("runners.start", name="x", job=job)["started"]


def test_half_sent_code_is_not_there(server: Server, proxy: Proxy, root: Path, tmp_path: Path) -> None:
    link = Link(server.host(root, server.client(proxy.port)))
    sent = files(tmp_path / "src", "eyas/a.py", "eyas/b.py", size=3_000_000)

    def cut() -> Iterator[bytes]:
        for number, piece in enumerate(sent.tar()):
            if number == 4:
                proxy.cut()
            yield piece

    with pytest.raises(LinkLost):
        link.call("shelf.receive", cut(), kind="code", digest=sent.digest)
    assert not link.call("shelf.have", kind="code", digests=[sent.digest])["have"]
    assert ship.send_code(link, sent)
    assert link.call("shelf.have", kind="code", digests=[sent.digest])["have"]


def test_what_is_not_the_promised_content_is_refused(link: Link, root: Path, tmp_path: Path) -> None:
    sent = files(tmp_path / "src", "eyas/a.py")
    (tmp_path / "src" / "eyas" / "a.py").write_bytes(b"y" * 100)
    with pytest.raises(UserError, match="what came has the digest"):
        ship.send_code(link, sent)
    assert not list((root / "code").iterdir())


def test_uploads_that_race(server: Server, root: Path, tmp_path: Path) -> None:
    link = Link(server.host(root))
    link.call("shelf.hello")
    sent = files(tmp_path / "src", "eyas/a.py", "eyas/b.py", size=500_000)
    data = files(tmp_path / "data", "p.jsonl", size=2_000_000)
    faults: list[BaseException] = []

    def send() -> None:
        try:
            ship.send_code(link, sent)
            while True:
                try:
                    ship.send_data(link, data, bool(server.bin), Silent())
                    return
                except LinkLost:  # Another one was faster, and took the folder away.
                    pass
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=send) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults
    on_shelf(root, "code", sent)
    on_shelf(root, "data", data)


@pytest.mark.parametrize("rsync", [True, False])
def test_data_goes_once(server: Server, link: Link, root: Path, tmp_path: Path, rsync: bool) -> None:
    if rsync and not server.bin:
        pytest.skip("needs rsync")
    sent = files(tmp_path / "data", "a b.jsonl", "draft/config.json", "draft/'w'.safetensors", size=70_000)
    assert ship.send_data(link, sent, rsync, Silent())
    on_shelf(root, "data", sent)
    assert not ship.send_data(link, sent, rsync, Silent())


def test_damaged_data_comes_again(server: Server, link: Link, root: Path, tmp_path: Path) -> None:
    if not server.bin:
        pytest.skip("needs rsync")
    sent = files(tmp_path / "data", "a.jsonl", "b.jsonl")
    place = root / "data" / f".{sent.digest}"
    link.call("shelf.hello")
    place.mkdir()
    (place / "a.jsonl").write_bytes(b"z" * 100)  # As rsync sees it: same size, same time.
    time = (tmp_path / "data" / "a.jsonl").stat()
    subprocess.run(["touch", "-d", f"@{time.st_mtime_ns / 1e9:.9f}", place / "a.jsonl"], check=True)
    (place / "left-over").write_text("x")
    assert ship.send_data(link, sent, True, Silent())
    on_shelf(root, "data", sent)


def test_a_cut_transfer_goes_on_where_it_was(server: Server, proxy: Proxy, root: Path, tmp_path: Path) -> None:
    if not server.bin:
        pytest.skip("needs rsync")
    link = Link(server.host(root, server.client(proxy.port)))
    sent = files(tmp_path / "data", "a.jsonl", size=20_000_000)
    link.call("shelf.hello")

    class Cutting(Silent):
        done = 0.0

        def advance(self, amount: float) -> None:
            self.done += amount
            if self.done > 1_000_000:
                proxy.cut()

    proxy.bytes_a_second = 20e6
    with pytest.raises(LinkLost):
        ship.send_data(link, sent, True, Cutting())
    partial = root / "data" / f".{sent.digest}" / ".rsync-partial" / "a.jsonl"
    assert partial.stat().st_size > 0
    proxy.bytes_a_second = None
    assert ship.send_data(link, sent, True, Silent())
    on_shelf(root, "data", sent)


def test_what_a_run_file_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    files(tmp_path, "p.jsonl", "draft/config.json", "work.txt")
    data, parcels = ship.files_of(
        {
            "target": {"model": "p.jsonl"},
            "prompts": {"train": "p.jsonl", "heldout": "builtin"},
            "bench": {"workloads": ["heldout", "work.txt@4096", "/there/only.jsonl"]},
            "drafts": ["draft", "/there/draft"],
        }
    )
    prompts, draft, work = (sent.digest for sent in parcels)
    work, draft = (draft, work) if "work.txt" in str(parcels[1].files) else (work, draft)
    assert data == {
        "target": {"model": "p.jsonl"},
        "prompts": {"train": f"{{data}}/{prompts}/p.jsonl", "heldout": "builtin"},
        "bench": {"workloads": ["heldout", f"{{data}}/{work}/work.txt@4096", "/there/only.jsonl"]},
        "drafts": [f"{{data}}/{draft}/draft", "/there/draft"],
    }
