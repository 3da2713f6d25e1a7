"""Files of every kind come out as the same numbered lines."""

import bz2
import codecs
import csv
import gzip
import json
import lzma
from pathlib import Path
from typing import Any

import pytest

from eyas.corpus import files
from eyas.corpus.files import blocks
from eyas.datafiles import expand
from eyas.errors import UserError

ROWS: list[dict[str, Any]] = [{"prompt": f"é{i}", "response": "b\nc" * (i % 3)} for i in range(50)]


def read(path: Path | str) -> list[tuple[int, Any]]:
    return [(number, json.loads(line)) for block in blocks(str(path)) for number, line in block.numbered()]


def lines(rows: list[Any], end: str = "\n") -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + end for row in rows).encode()


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that small files take many blocks."""
    monkeypatch.setattr(files, "BLOCK", 100)
    monkeypatch.setattr(files, "LOOK", 400)


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_json_lines(tmp_path: Path, end: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(codecs.BOM_UTF8 + b"\n" + lines(ROWS, end).rstrip())
    assert read(path) == [(number, row) for number, row in enumerate(ROWS, 2)]


@pytest.mark.parametrize("name", ["a.json", "a.jsonl"])
@pytest.mark.parametrize("indent", [None, 1])
def test_a_json_array_whatever_the_file_is_called(tmp_path: Path, name: str, indent: int | None) -> None:
    path = tmp_path / name
    path.write_bytes(codecs.BOM_UTF8 + json.dumps(ROWS, indent=indent, ensure_ascii=False).encode())
    found = read(path)
    assert [row for _, row in found] == ROWS
    assert [number for number, _ in found] == ([1] * 50 if indent is None else [2 + 4 * i for i in range(50)])


def test_values_over_several_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("\n".join(json.dumps(row, indent=1, ensure_ascii=False) for row in ROWS))
    assert read(path) == [(1 + 4 * i, row) for i, row in enumerate(ROWS)]


def test_an_array_that_is_cut_short_loses_its_last_value_only(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(ROWS, indent=1)[:-20])
    found = [(number, line) for block in blocks(str(path)) for number, line in block.numbered()]
    assert [json.loads(line) for _, line in found[:-1]] == ROWS[:-1]
    assert found[-1][0] == 2 + 4 * 49
    with pytest.raises(ValueError, match=r"Unterminated|Expecting"):
        json.loads(found[-1][1])


@pytest.mark.parametrize("row", [3, 48])
def test_an_array_that_is_damaged_inside(tmp_path: Path, row: int) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps(ROWS, indent=1).replace(f'"\\u00e9{row}"', "oops", 1))
    with pytest.raises(UserError, match=rf"a\.json:{2 + 4 * row}: damaged JSON"):
        read(path)


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz", ".zst"])
def test_packed(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.jsonl{suffix}"
    if suffix == ".zst":
        zstandard = pytest.importorskip("zstandard", reason="the extra `data`")
        path.write_bytes(zstandard.compress(lines(ROWS)))
    else:
        path.write_bytes({".gz": gzip, ".bz2": bz2, ".xz": lzma}[suffix].compress(lines(ROWS)))
    assert [row for _, row in read(path)] == ROWS
    assert [block.done for block in blocks(str(path))][-1] == path.stat().st_size


def test_packed_and_cut_short(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(lines(ROWS))[:-20])
    with pytest.raises(UserError, match=r"a\.jsonl\.gz: damaged or cut short"):
        read(path)


@pytest.mark.parametrize(("name", "delimiter"), [("a.csv", ","), ("a.tsv", "\t")])
def test_tables(tmp_path: Path, name: str, delimiter: str) -> None:
    path = tmp_path / name
    talk = [{"role": "user", "content": "x"}]
    with path.open("w", newline="", encoding="utf-8-sig") as file:
        writer = csv.writer(file, delimiter=delimiter)
        writer.writerows([["prompt", "messages"], ["a\nb", ""], ["é", json.dumps(talk)]])
    assert read(path) == [(2, {"prompt": "a\nb", "messages": ""}), (4, {"prompt": "é", "messages": talk})]


def test_a_table_with_bytes_that_are_no_utf8(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b"prompt\nfine\ncaf\xe9\n")
    assert [line for block in blocks(str(path)) for _, line in block.numbered()] == [
        b'{"prompt": "fine"}',
        b'{"prompt": "caf\xe9"}',
    ]


def test_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="the extra `data`")
    parquet = pytest.importorskip("pyarrow.parquet", reason="the extra `data`")
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), path, row_group_size=7)
    assert read(path) == list(enumerate(ROWS, 1))
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(UserError, match="not a whole Parquet file"):
        read(path)


def test_texts(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(codecs.BOM_UTF8 + "one\r\n\n two\u2028parts ".encode())
    found = list(blocks(str(path)))
    assert all(block.text for block in found)
    assert [(n, line.decode()) for block in found for n, line in block.numbered()] == [
        (1, "one"),
        (3, "two\u2028parts"),
    ]


def test_a_data_set_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("datasets", reason="the extra `hub`")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train.jsonl").write_bytes(lines(ROWS))
    assert read(f"hf:{tmp_path / 'set'}") == list(enumerate(ROWS, 1))
    with pytest.raises(UserError, match="neither a file nor a data set"):
        read(f"hf:{tmp_path / 'other'}")


def test_folders_and_globs(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.csv", "sub/c.jsonl.gz", "sub/d.parquet.gz", "notes.md", ".hidden/e.jsonl", "sub/.f.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    names = [str(tmp_path / name) for name in ("a.csv", "b.jsonl", "sub/c.jsonl.gz")]
    assert expand(str(tmp_path)) == names
    assert expand(str(tmp_path / "**/*.jsonl*")) == names[1:]
    assert expand(names[0]) == names[:1]
    assert expand("owner/set") == ["hf:owner/set"]
    assert expand("owner/set:test") == ["hf:owner/set:test"]
    for name, message in [
        ("missing.txt", "cannot read missing.txt"),
        (str(tmp_path / "notes.md"), "data are read from .txt"),
        (str(tmp_path / "*.md"), "holds no file that can be read"),
        (str(tmp_path / "sub/d.parquet.gz"), "data are read from"),
    ]:
        with pytest.raises(UserError, match=message):
            expand(name)
