"""A step's finished output: published whole, and verified before it is used again.

`outputs.json` lists every file with its size and digest. Reading hundreds of gigabytes to start a run would be absurd,
so a file above 16 MiB is verified by its size and its first and last MiB, whose digest was recorded when it was
published.
"""

import contextlib
import os
import shutil
from pathlib import Path
from typing import Any

from eyas.digests import digest_bytes, digest_file
from eyas.errors import UserError
from eyas.files import fsync_folder, read_json, write_json

FULL_DIGEST_BYTES = 16 << 20
PIECE_BYTES = 1 << 20
LIST = "outputs.json"


def publish(partial: Path, out: Path, result: dict[str, Any]) -> None:
    """Write result.json and outputs.json into `partial`, make everything in it durable, rename it to `out`.

    Raises OSError (disk full, …) and ValueError or TypeError for a result that is not JSON.
    """
    write_json(partial / "result.json", result)
    (partial / LIST).unlink(missing_ok=True)
    files = {}
    for name, path in _walk(partial):
        if not path.is_symlink():
            _fsync(path)
        files[name] = _describe(path)
    for folder, _, _ in os.walk(partial):
        fsync_folder(Path(folder))
    write_json(partial / LIST, {"files": files})
    partial.rename(out)
    fsync_folder(out.parent)


def verify(out: Path) -> str | None:
    """What is wrong with a finished output (None: nothing). Names the first file that differs."""
    if out.is_file():
        return "it is a file, not a folder"
    if not (out / LIST).is_file():
        return "it was never finished"
    try:
        listed = read_json(out / LIST)["files"]
        found = dict(_walk(out))
        found.pop(LIST)
        for name in sorted(listed.keys() | found.keys()):
            if name not in found:
                return f"{name} is missing"
            if name not in listed:
                return f"{name} does not belong to it"
            if not _matches(found[name], listed[name]):
                return f"{name} is damaged"
    except (UserError, KeyError, TypeError, AttributeError):
        return f"{LIST} is damaged"
    except OSError as error:
        return f"it cannot be read ({error.strerror})"
    return None


def remove(folder: Path) -> None:
    """Delete a folder. Interrupted half-way, what is left does not verify."""
    if folder.exists():
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            (folder / "out" / LIST).unlink()
        shutil.rmtree(folder)


def _walk(folder: Path) -> list[tuple[str, Path]]:
    """Files and symbolic links below `folder`, by relative name."""
    entries = []
    for root, folders, files in os.walk(folder):
        links = [name for name in folders if (Path(root) / name).is_symlink()]
        entries += [Path(root) / name for name in files + links]
    return sorted((path.relative_to(folder).as_posix(), path) for path in entries)


def _describe(path: Path) -> dict[str, Any]:
    if path.is_symlink():
        return {"link": str(path.readlink())}
    entry: dict[str, Any] = {"size": path.stat().st_size, "digest": digest_file(path)}
    if entry["size"] > FULL_DIGEST_BYTES:
        entry["ends"] = _ends(path, entry["size"])
    return entry


def _matches(path: Path, entry: dict[str, Any]) -> bool:
    if path.is_symlink():
        return entry.get("link") == str(path.readlink()) and path.exists()
    size = path.stat().st_size
    if size != entry["size"]:
        return False
    if "ends" in entry:
        return bool(_ends(path, size) == entry["ends"])
    return bool(digest_file(path) == entry["digest"])


def _ends(path: Path, size: int) -> str:
    with path.open("rb") as file:
        head = file.read(PIECE_BYTES)
        file.seek(size - PIECE_BYTES)
        return digest_bytes(head + file.read(PIECE_BYTES))


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
