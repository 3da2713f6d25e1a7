"""Code and data that are brought to a host: verified, then given their place."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

from eyas.hosts.there.base import Refused, digest_of, file_digest, held, root_of

LEAST_FREE = 1 << 30


def hello(request: dict[str, Any]) -> dict[str, Any]:
    """Where root is, how much room it has, and what is here already."""
    root = root_of(request)
    return {
        "root": str(root),
        "free": shutil.disk_usage(root).free,
        "python": list(sys.version_info[:3]),
        "executable": sys.executable,
        "rsync": shutil.which("rsync"),
        "time": time.time(),
    }


def have(request: dict[str, Any]) -> dict[str, Any]:
    """Which of the digests are here. Code is read and compared each time; data was when it came."""
    shelf, found = root_of(request) / request["kind"], []
    for digest in request["digests"]:
        there = shelf / digest
        if there.is_dir() and request["kind"] == "code" and digest_of(there) != digest:
            shutil.rmtree(there)
        if there.is_dir():
            found.append(digest)
    return {"have": found}


def imports(request: dict[str, Any]) -> dict[str, Any]:
    """Which modules an interpreter here lacks; all of them, if the environment at `ready` is not a whole one."""
    folder = request.get("ready")
    if folder is not None and not Path(folder, "ready.json").is_file():
        return {"missing": request["modules"]}
    find = (
        "import importlib.util,json,sys;"
        "print(json.dumps([m for m in sys.argv[1:] if importlib.util.find_spec(m) is None]))"
    )
    command = [request["python"], "-c", find, *request["modules"]]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    if done.returncode:
        return {"missing": request["modules"]}
    return {"missing": json.loads(done.stdout.splitlines()[-1])}


def room(request: dict[str, Any]) -> dict[str, Any]:
    """Whether data are here already; else, after a look at the room that there is, the folder that rsync fills."""
    root = root_of(request)
    if (root / "data" / request["digest"]).is_dir():
        return {"have": True}
    free = shutil.disk_usage(root).free
    if free < request["size"] + LEAST_FREE:
        raise Refused(f"{root}: {free >> 20} MiB free, {request['size'] >> 20} MiB and 1 GiB of air are needed")
    place = root / "data" / ("." + request["digest"])
    if request["rsync"]:
        place.mkdir(exist_ok=True, mode=0o700)
    return {"have": False, "place": str(place)}


def receive(request: dict[str, Any]) -> dict[str, Any]:
    """Take a tar from the standard input, whole or not at all, and put it on its shelf."""
    root, digest = root_of(request), request["digest"]
    place = root / request["kind"] / f".{digest}.{os.getpid()}.{time.time_ns()}"
    place.mkdir(mode=0o700)
    try:
        try:
            with tarfile.open(fileobj=sys.stdin.buffer, mode="r|") as tar:
                for member in tar:
                    if not member.isfile() or member.name.startswith("/") or ".." in Path(member.name).parts:
                        raise Refused(f"{member.name}: not a file that was asked for")
                    path = place / member.name
                    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                    source = tar.extractfile(member)
                    assert source is not None
                    with path.open("xb") as file:
                        shutil.copyfileobj(source, file, 1 << 20)
        except (tarfile.TarError, EOFError, OSError) as error:
            raise Refused(f"what came was not whole ({error})") from error
        return shelve(place, root / request["kind"] / digest, digest)
    finally:
        shutil.rmtree(place, ignore_errors=True)


def accept(request: dict[str, Any]) -> dict[str, Any]:
    """Verify what rsync brought and put it on its shelf; a file that is wrong is deleted and named."""
    shelf, digest = root_of(request) / "data", request["digest"]
    place = shelf / ("." + digest)
    with held(shelf / ".lock"):
        if (shelf / digest).is_dir():
            shutil.rmtree(place, ignore_errors=True)
            return {"wrong": []}
        wrong = []
        for name, expected in request["files"]:
            if not (place / name).is_file() or file_digest(place / name) != expected:
                (place / name).unlink(missing_ok=True)
                wrong.append(name)
        known = {name for name, _ in request["files"]}
        for path in sorted(place.rglob("*"), reverse=True):
            if path.is_dir() and not path.is_symlink():
                if not any(path.iterdir()):
                    path.rmdir()
            elif not wrong and path.relative_to(place).as_posix() not in known:
                path.unlink()
        if wrong:
            return {"wrong": wrong}
        return {"wrong": [], **shelve(place, shelf / digest, digest)}


def shelve(place: Path, shelf: Path, digest: str) -> dict[str, Any]:
    """Give a verified folder its name, read-only; whoever was first wins. Raises Refused."""
    found = digest_of(place)
    if found != digest:
        raise Refused(f"what came has the digest {found[:12]}, not {digest[:12]}")
    for path in place.rglob("*"):
        handle = os.open(path, os.O_RDONLY)
        os.fchmod(handle, 0o700 if path.is_dir() else 0o400)
        os.fsync(handle)
        os.close(handle)
    try:
        place.rename(shelf)
    except OSError:
        if not shelf.is_dir():
            raise
    return {}
