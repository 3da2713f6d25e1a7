"""Atomic files and plain words for the operating system's errors."""

import errno
from pathlib import Path

import pytest

from eyas.errors import UserError
from eyas.files import plain_os_errors, read_json, write_atomic, write_json
from eyas.run.faults import missing_extra, plain_errors


def test_a_failed_write_leaves_the_old_content(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomic(path, "old")
    with pytest.raises(TypeError):
        write_atomic(path, 3)  # type: ignore[arg-type]
    assert path.read_text() == "old"
    with pytest.raises(ValueError, match="JSON"):
        write_json(path, float("inf"))
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_a_damaged_json_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(UserError, match=r"x\.json: not valid JSON"):
        read_json(tmp_path / "x.json")


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (errno.ENOSPC, "disk full while writing /x"),
        (errno.EDQUOT, "disk full while writing /x"),
        (errno.EROFS, "/x is on a read-only file system"),
        (errno.EACCES, "no permission for /x"),
        (errno.ENOTDIR, "/x: a file stands where a folder is needed"),
    ],
)
def test_errors_of_the_system(tmp_path: Path, number: int, text: str) -> None:
    with pytest.raises(UserError, match=text), plain_os_errors(tmp_path):
        raise OSError(number, "what", "/x")


def test_other_errors_pass(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="what"), plain_errors(tmp_path):
        raise OSError(errno.EIO, "what")
    with pytest.raises(RuntimeError, match="else"), plain_errors(tmp_path):
        raise RuntimeError("something else")
    with pytest.raises(ImportError, match="eyas"), plain_errors(tmp_path):
        raise ImportError("no eyas.x", name="eyas.x")


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("CUDA out of memory. Tried to allocate 2 GiB\nmore"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory"),
    ],
)
def test_exhausted_memory(tmp_path: Path, error: Exception) -> None:
    with pytest.raises(UserError, match=r"out of memory: lower answers\.batch"), plain_errors(tmp_path):
        raise error


def test_missing_extras_are_named() -> None:
    assert "eyas[train]" in str(missing_extra(ModuleNotFoundError(name="torch.nn")))
    assert "eyas[report]" in str(missing_extra(ModuleNotFoundError(name="matplotlib")))
    assert missing_extra(ImportError("x")) is None
