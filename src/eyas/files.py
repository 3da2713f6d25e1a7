"""Files that are whole or absent, and operating-system errors in plain words."""

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from eyas.errors import UserError


def fsync_folder(folder: Path) -> None:
    """Make renames inside `folder` durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write, which becomes `path` at the end: that holds either its old content or all of the new."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    fsync_folder(path.parent)


def write_atomic(path: Path, data: bytes | str) -> None:
    """Write `data` as the whole of `path`, atomically."""
    with replacing(path) as file:
        file.write(data.encode() if isinstance(data, str) else data)


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON, atomically."""
    write_atomic(path, json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    """Read a JSON file; a damaged one is a UserError that names it."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not valid JSON ({error}); delete it or restore it") from error


def number(value: Any) -> float | None:
    """`value` from a JSON file if it is a number that can be reckoned with, else None."""
    return value if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300 else None


@contextlib.contextmanager
def plain_os_errors(where: Path) -> Iterator[None]:
    """Turn full disks, read-only folders, missing rights and impossible names into a UserError with a remedy."""
    try:
        yield
    except OSError as error:
        path = error.filename or where
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            there = next((place for place in (where, *where.parents) if place.exists()), Path.cwd())
            raise UserError(
                f"disk full while writing {error.filename2 or path} ({shutil.disk_usage(there).free / 2**20:.0f} MiB "
                "free): free some space and run the same command again; what is finished is kept"
            ) from error
        if error.errno == errno.EROFS:
            raise UserError(f"{path} is on a read-only file system: choose another folder with --runs DIR") from error
        if error.errno in (errno.ENOTDIR, errno.EEXIST):
            above = (Path(os.fsdecode(path)), *Path(os.fsdecode(path)).parents)
            in_the_way = next((place for place in above if place.is_file()), path)
            raise UserError(f"{in_the_way}: a file stands where a folder is needed: delete it") from error
        if error.errno == errno.EISDIR:
            raise UserError(f"{error.filename2 or path}: a folder stands where a file is needed: delete it") from error
        if error.errno == errno.ENAMETOOLONG:
            raise UserError(f"{path}: this name is too long for the file system: choose a shorter one") from error
        if error.errno in (errno.EACCES, errno.EPERM):
            raise UserError(f"no permission for {path}: change its rights or choose another folder") from error
        raise
