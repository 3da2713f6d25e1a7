"""What goes to a host, by content: our own code and the files that a run file names.

A folder there is named by the digest of what it holds (`base.digest_of`), is filled beside its place, verified there,
and renamed. So what is there is whole, and goes only once.
"""

import os
import re
import shlex
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import eyas
from eyas.errors import UserError
from eyas.files import plain_os_errors
from eyas.hosts.ssh import Link, LinkLost, fault
from eyas.hosts.there import base
from eyas.progress import Progress
from eyas.run.protocol import printable

TRIES = 5
BYTES_DONE = re.compile(rb"([\d,]+)\s+\d+%")


@dataclass(frozen=True)
class Parcel:
    """Files that lie in one folder there."""

    digest: str
    files: tuple[tuple[str, Path, str], ...]
    """Name there, path here, sha256."""

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(path.stat().st_size for _, path, _ in self.files)

    def tar(self) -> Iterator[bytes]:
        """A deterministic archive: sorted, without times and owners. Raises UserError: a file changed meanwhile."""
        sent = 0
        for name, path, _ in self.files:
            info = tarfile.TarInfo(name)
            info.size, info.mode = path.stat().st_size, 0o600
            head = info.tobuf(tarfile.GNU_FORMAT)
            yield head
            left = info.size
            with path.open("rb") as file:
                while left:
                    piece = file.read(min(left, 1 << 20))
                    if not piece:
                        raise UserError(f"{path} became shorter while it was sent: run the same command again")
                    left -= len(piece)
                    yield piece
            yield bytes(-info.size % tarfile.BLOCKSIZE)
            sent += len(head) + info.size + -info.size % tarfile.BLOCKSIZE
        # Whole records: the reader waits for those.
        yield bytes(2 * tarfile.BLOCKSIZE + -(sent + 2 * tarfile.BLOCKSIZE) % tarfile.RECORDSIZE)


def parcel(files: dict[str, Path]) -> Parcel:
    """The parcel of these files (name there, path here). Raises UserError: one cannot be read."""
    made = []
    for name, path in sorted(files.items()):
        with plain_os_errors(path):
            made.append((name, path, base.file_digest(path)))
    return Parcel(base.digest_of_lines([(name, sha) for name, _, sha in made]), tuple(made))


def code() -> Parcel:
    """Our own package, as it is."""
    package = Path(eyas.__file__).parent
    found = [path for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    names = {path: (PurePosixPath("eyas") / path.relative_to(package).as_posix()).as_posix() for path in found}
    return parcel({name: path for path, name in names.items() if not path.name.startswith(".")})


def send_code(link: Link, sent: Parcel) -> bool:
    """Bring our code there, unless it is there and undamaged; whether it had to go. Raises LinkLost."""
    if link.call("shelf.have", kind="code", digests=[sent.digest])["have"]:
        return False
    link.call("shelf.receive", sent.tar(), kind="code", digest=sent.digest)
    return True


def send_data(link: Link, sent: Parcel, rsync: bool, progress: Progress) -> bool:
    """Bring files of the user there; whether they had to go. What came before a break is kept (rsync).

    Raises LinkLost; UserError: no room there, a file that changed meanwhile.
    """
    rsync = rsync and shutil.which("rsync") is not None
    there = link.call("shelf.room", digest=sent.digest, size=sent.size, rsync=rsync)
    if there["have"]:
        return False
    progress.total(sent.size, "bytes")
    if not rsync:
        link.call("shelf.receive", _counted(sent.tar(), progress), kind="data", digest=sent.digest)
        return True
    files, wrong = [[name, sha] for name, _, sha in sent.files], [""]
    for _ in range(TRIES):
        try:
            _rsync(link, sent, there["place"], progress)
        except LinkLost:
            # Another one may have brought them, and taken the folder away under our rsync.
            if link.call("shelf.have", kind="data", digests=[sent.digest])["have"]:
                return True
            raise
        wrong = link.call("shelf.accept", digest=sent.digest, files=files)["wrong"]
        if not wrong:
            return True
    raise UserError(f"{wrong[0]} came damaged {TRIES} times: does it change meanwhile?")


def _counted(pieces: Iterator[bytes], progress: Progress) -> Iterator[bytes]:
    for piece in pieces:
        yield piece
        progress.advance(len(piece))


def _rsync(link: Link, sent: Parcel, place: str, progress: Progress) -> None:
    """One pass of rsync over all files, which goes on where an earlier one broke. Raises LinkLost, UserError."""
    command = ["rsync", "-rtL", "-s", "--partial-dir=.rsync-partial", "--info=progress2", "-e", shlex.join(link.ssh)]
    if link.host.bandwidth_kib:
        command.append(f"--bwlimit={link.host.bandwidth_kib}")
    with tempfile.TemporaryDirectory(prefix="eyas-") as staged, tempfile.TemporaryFile() as errors:
        for name, path, _ in sent.files:
            link_here = Path(staged, name)
            link_here.parent.mkdir(parents=True, exist_ok=True)
            link_here.symlink_to(path.absolute())
        process = subprocess.Popen(
            [*command, f"{staged}/", f"{link.host.ssh}:{place}/"],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, start_new_session=True,
        )  # fmt: skip
        assert process.stdout is not None
        try:
            done = 0
            while said := os.read(process.stdout.fileno(), 4096):
                for count in BYTES_DONE.findall(said):
                    progress.advance(int(count.replace(b",", b"")) - done)
                    done = int(count.replace(b",", b""))
            code = process.wait()
        finally:
            process.terminate()
            process.wait()
            process.stdout.close()
        errors.seek(0)
        text = errors.read().decode(errors="replace")
    if code == 0:
        return
    if "No space left" in text or "Disk quota" in text:
        raise UserError(f"{link.host.name}: no space is left there under {place}")
    if isinstance(error := fault(link.host, 255, text), UserError):
        raise error
    raise LinkLost(printable(text.splitlines()[0] if text.strip() else f"rsync ended with {code}"))


def files_of(data: dict[str, Any]) -> tuple[dict[str, Any], list[Parcel]]:
    """A run file's data with the paths of files that are here replaced by `{data}/…`, and what has to go there.

    Prompts, workloads and existing drafts that are here go; all else, such as the target, is meant there.
    """
    parcels: list[Parcel] = []

    def moved(value: Any) -> Any:
        if not isinstance(value, str):
            return value
        name, at, tokens = value.rpartition("@")
        name, suffix = (name, at + tokens) if at and tokens.isdigit() and not Path(value).exists() else (value, "")
        here = Path.cwd() / Path(name).expanduser()
        if not here.name or not here.exists():
            return value
        inside = [path for path in here.rglob("*") if path.is_file()] if here.is_dir() else [here]
        sent = parcel({path.relative_to(here.parent).as_posix(): path for path in inside})
        parcels.append(sent)
        return f"{{data}}/{sent.digest}/{here.name}{suffix}"

    data = {name: dict(section) if isinstance(section, dict) else section for name, section in data.items()}
    prompts, bench = data.get("prompts"), data.get("bench")
    for field in ("train", "heldout"):
        if isinstance(prompts, dict) and field in prompts:
            prompts[field] = moved(prompts[field])
    if isinstance(bench, dict) and isinstance(bench.get("workloads"), list):
        bench["workloads"] = [moved(one) for one in bench["workloads"]]
    if isinstance(data.get("drafts"), list):
        data["drafts"] = [moved(one) for one in data["drafts"]]
    return data, list({sent.digest: sent for sent in parcels}.values())
