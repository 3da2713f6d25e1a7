"""Files that are whole or absent, and operating-system errors in plain words."""

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from eyas.errors import UserError


def fsync_folder(folder: Path) -> None:
    """Make renames inside `folder` durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_atomic(path: Path, data: bytes | str) -> None:
    """Write `data` so that `path` holds either its old content or all of the new, whatever happens meanwhile."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    fsync_folder(path.parent)


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON, atomically."""
    write_atomic(path, json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    """Read a JSON file; a damaged one is a UserError that names it."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not valid JSON ({error}); delete it or restore it") from error


@contextlib.contextmanager
def plain_os_errors(where: Path) -> Iterator[None]:
    """Turn full disks, read-only folders, missing rights and exhausted memory into a UserError with a remedy."""
    try:
        yield
    except OSError as error:
        path = error.filename or where
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            free = shutil.disk_usage(where if where.exists() else Path.cwd()).free / 2**20
            raise UserError(
                f"disk full while writing {path} ({free:.0f} MiB free): free some space and run the same command "
                "again; what is finished is kept"
            ) from error
        if error.errno == errno.EROFS:
            raise UserError(f"{path} is on a read-only file system: choose another folder with --runs DIR") from error
        if error.errno == errno.ENOTDIR:
            raise UserError(f"{path}: a file stands where a folder is needed: choose another folder") from error
        if error.errno in (errno.EACCES, errno.EPERM):
            raise UserError(f"no permission for {path}: change its rights or choose another folder") from error
        raise
    except MemoryError as error:
        raise UserError(
            "out of memory: lower answers.batch or train.batch_tokens in the run file and run it again; "
            "what is finished is kept"
        ) from error
