"""The far end of the link, and what its parts share: fed to the interpreter there by each call.

Only the standard library, and nothing newer than Python 3.8, so that an old interpreter can say that it is too old.
Request and answers are lines of JSON (`ssh.py`); everything here may be called again after a connection broke.

    root/code/<digest>/      our package, complete and verified     data/<digest>/   files of the user, likewise
    root/code/.<digest>…/    on its way                             data/.<digest>/  on its way, filled by rsync
    root/runners/<name>/     job.json process.json log.txt exit.json lock: one run's runner
    root/runs/<name>/        the run folder itself
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

PASSING = {"overlay", "overlayfs", "aufs", "tmpfs", "ramfs", "devtmpfs", "squashfs", "proc", "sysfs"}


class Refused(Exception):  # noqa: N818
    """What was asked cannot be done here; the text is for the user."""


def root_of(request: dict[str, Any]) -> Path:
    """The folder of everything; made if it is a good place. Raises Refused."""
    root = Path(request["root"]).expanduser()
    place = root
    while not place.exists():
        place = place.parent
    kind, mount = file_system(place)
    if request["lasting"] and kind in PASSING:
        raise Refused(
            f"host.root {root} lies on {kind} (mounted at {mount}), which is lost with the container or at the next "
            "start of the machine: choose a folder on a disk that stays"
        )
    try:
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        for name in ("code", "data", "env", "runners", "runs"):
            (root / name).mkdir(exist_ok=True, mode=0o700)
    except OSError as error:
        raise Refused(f"host.root {root} cannot be made ({error.strerror}): choose another folder") from error
    return root.resolve()


def file_system(place: Path) -> tuple[str, str]:
    """Kind and mount point of the file system that `place` is on."""
    real, found = str(place.resolve()), ("unknown", "/")
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        mount = before.split()[4].encode().decode("unicode_escape")
        if os.path.commonpath([mount, real]) == mount and len(mount) >= len(found[1]):
            found = after.split()[0], mount
    return found


def digest_of(folder: Path) -> str:
    """sha256 of the lines that `sha256sum` would print for all files in `folder`, sorted by name."""
    lines = []
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise Refused(f"{path} is no plain file")
        if path.is_file():
            lines.append((path.relative_to(folder).as_posix(), file_digest(path)))
    return digest_of_lines(lines)


def digest_of_lines(lines: list[tuple[str, str]]) -> str:
    """The digest of a folder whose files (name, sha256) are known."""
    return hashlib.sha256("".join(f"{digest}  {name}\n" for name, digest in sorted(lines)).encode()).hexdigest()


def file_digest(path: Path) -> str:
    """sha256 of a file."""
    sha = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            sha.update(piece)
    return sha.hexdigest()


class held:  # noqa: N801
    """A lock for the time of a `with`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> None:
        self.handle = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(self.handle, fcntl.LOCK_EX)

    def __exit__(self, *_: object) -> None:
        os.close(self.handle)


def try_lock(path: Path) -> int | None:
    """Handle of a lock that is now ours; None when it is another's."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return handle
    except BlockingIOError:
        os.close(handle)
        return None


def write_json(path: Path, value: Any) -> None:
    """Write a small file, whole or not at all."""
    new = path.with_name(f".{path.name}.{os.getpid()}")
    new.write_text(json.dumps(value))
    new.replace(path)


def read_json(path: Path) -> dict[str, Any]:
    """Content of a small file; empty when there is none."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def answer(value: dict[str, Any]) -> None:
    """Say one line."""
    sys.stdout.write("eyas:" + json.dumps(value) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Read a part of this package and a request for it, and do what that says."""
    os.umask(0o077)
    sys.modules["eyas.hosts.there.base"] = sys.modules["__main__"]
    source = sys.stdin.buffer.read(int(sys.stdin.buffer.readline()))
    request = json.loads(sys.stdin.buffer.readline())
    part: dict[str, Any] = {"__name__": "eyas.hosts.there." + request["part"]}
    exec(compile(source, "eyas-" + request["part"], "exec"), part)
    try:
        said = part[request["do"]](request)
        if said is not None:
            answer({**said, "last": True})
    except Refused as refused:
        answer({"refused": str(refused)})
    except BrokenPipeError:
        os._exit(1)
    except OSError as error:
        answer({"refused": f"{error.filename or request['root']}: {error.strerror or error}"})


if __name__ == "__main__":
    main()
