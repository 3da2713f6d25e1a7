"""Atomic files and plain words for the operating system's errors."""

import errno
import os
from pathlib import Path

import pytest

from eyas.digests import digest_sampled
from eyas.errors import UserError
from eyas.files import number, plain_os_errors, read_json, write_atomic, write_json
from eyas.run.faults import ANYWHERE, IN_A_RUN, missing_extra, plain_errors


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
        (errno.EISDIR, "/x: a folder stands where a file is needed: delete it"),
        (errno.EEXIST, "/x: a file stands where a folder is needed: delete it"),
        (errno.ENOTDIR, "/x: a file stands where a folder is needed: delete it"),
        (errno.ENAMETOOLONG, "/x: this name is too long for the file system"),
    ],
)
def test_errors_of_the_system(tmp_path: Path, number: int, text: str) -> None:
    with pytest.raises(UserError, match=text), plain_os_errors(tmp_path):
        raise OSError(number, "what", "/x")


def test_a_copy_that_found_no_room_names_where_it_goes(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="disk full while writing /to"), plain_os_errors(tmp_path):
        raise OSError(errno.ENOSPC, "what", "/from", None, "/to")


def test_the_file_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "out").touch()
    with pytest.raises(UserError, match=rf"^{tmp_path}/out: a file stands"), plain_os_errors(tmp_path):
        (tmp_path / "out" / "deep" / "piece").write_text("")


def test_numbers_from_files() -> None:
    assert [number(value) for value in (3, 0.5, 0)] == [3, 0.5, 0]
    strange = ("x", None, True, [], float("nan"), float("inf"), 10**400)
    assert [number(value) for value in strange] == [None] * len(strange)


def test_a_sampled_digest_tells_a_fine_tune_apart(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    header = b'{"__metadata__":{}}'
    plain = len(header).to_bytes(8, "little") + header + bytes(1 << 20)

    def digest(data: bytes) -> str:
        path.write_bytes(data)
        return digest_sampled(path)

    def changed(at: int) -> bytes:
        return plain[:at] + b"x" + plain[at + 1 :]

    assert digest(plain) == digest(plain)
    last = len(plain) - 1
    others = [changed(10), changed(last), changed(last - (64 << 10) + 1), changed(last // 15 + 100), plain + b"\0"]
    assert digest(plain) not in [digest(data) for data in others]
    assert len({digest(data) for data in (b"", b"short", b"\xff" * 8)}) == 3


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
        RuntimeError("unable to mmap 269060552 bytes from file <model.safetensors>: Cannot allocate memory (12)"),
        ImportError("libtorch_cpu.so: failed to map segment from shared object", name="torch._C"),
        OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)),
    ],
)
def test_exhausted_memory(tmp_path: Path, error: Exception) -> None:
    with pytest.raises(UserError, match=r"^out of memory: lower answers\.batch"), plain_errors(tmp_path, IN_A_RUN):
        raise error
    with pytest.raises(UserError, match=f"^out of memory: {ANYWHERE}$"), plain_errors(tmp_path):
        raise RuntimeError("a library's own words") from error


def test_missing_extras_are_named() -> None:
    assert "eyas[train]" in str(missing_extra(ModuleNotFoundError(name="torch.nn")))
    assert "eyas[report]" in str(missing_extra(ModuleNotFoundError(name="matplotlib")))
    assert missing_extra(ImportError("x")) is None
    assert missing_extra(ImportError("cannot import name 'x' from 'torch'", name="torch")) is None
