"""Prompt files: every form that is read, and every complaint."""

import codecs
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.corpus.builtin import load
from eyas.corpus.read import EMPTY, NOT_USER, Row, read
from eyas.errors import UserError


def jsonl(path: Path, *rows: Any) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_builtin() -> None:
    rows, rejected = read("builtin", "heldout", 3)
    first = load("heldout")[0]
    assert rows[0] == Row([user(first.text)], first.form, "builtin/heldout:1")
    assert [row.source for row in rows] == [f"builtin/heldout:{number}" for number in (1, 2, 3)]
    assert not rejected
    assert len(read("builtin", "train")[0]) == len(load("train"))


def test_lines_of_text(tmp_path: Path) -> None:
    path = tmp_path / "my.txt"
    path.write_bytes(codecs.BOM_UTF8 + "Wie geht’s?\r\n\r\n  two\u2028parts \nlast".encode())
    rows, _ = read(str(path), "train")
    assert [row.messages[0]["content"] for row in rows] == ["Wie geht’s?", "two\u2028parts", "last"]
    assert [row.source for row in rows] == [f"{path}:{number}" for number in (1, 3, 4)]


def test_objects(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "Be short."}, user("a"), {"role": "assistant", "content": "b"}, user("c")]
    rows = [{"prompt": "x", "form": "poem", "id": 7}, {"messages": messages}]
    path = tmp_path / "my.jsonl"
    path.write_bytes(codecs.BOM_UTF8 + "\r\n".join(["", *map(json.dumps, rows), ""]).encode())
    assert read(str(path), "train")[0] == [Row([user("x")], "poem", f"{path}:2"), Row(messages, "", f"{path}:3")]


def test_unusable_rows_are_counted(tmp_path: Path) -> None:
    answered = {"messages": [user("a"), {"role": "assistant", "content": "b"}]}
    name = jsonl(tmp_path / "x.jsonl", {"prompt": " "}, answered, {"prompt": "fine"}, {"messages": [user("")]})
    rows, rejected = read(name, "train")
    assert [row.source for row in rows] == [f"{name}:3"]
    assert rejected == {EMPTY: 2, NOT_USER: 1}


def test_limit_counts_rows_of_the_file(tmp_path: Path) -> None:
    name = jsonl(tmp_path / "x.jsonl", {"prompt": ""}, {"prompt": "one"}, "not read any more")
    rows, rejected = read(name, "train", 2)
    assert (len(rows), rejected.total()) == (1, 1)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not a JSON object"),
        ('"text"', "not a JSON object; write"),
        ("{}", "neither prompt nor messages"),
        ('{"prompt": 3}', "prompt must be a text"),
        ('{"prompt": "a", "messages": []}', "has both"),
        ('{"messages": []}', "messages must be a list"),
        ('{"messages": "hi"}', "messages must be a list"),
        ('{"messages": [{"role": "user"}]}', "the texts role and content"),
        ('{"messages": [{"role": "user", "content": [{"type": "text"}]}]}', "the texts role and content"),
        ('{"prompt": "a", "form": 3}', "form must be a text"),
        ('{"prompt": "\\ud800"}', "surrogates not allowed"),
        ("[" * 100_000, "not a JSON object"),
        ("caf\udce9", "not UTF-8"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"prompt": "fine"}\n' + line.encode(errors="surrogateescape"))
    with pytest.raises(UserError, match=message) as caught:
        read(str(path), "train")
    assert str(caught.value).startswith(f"{path}:2: ")
    assert "\n" not in str(caught.value)


def test_bad_files(tmp_path: Path) -> None:
    (tmp_path / "folder.txt").mkdir()
    (tmp_path / "blank.txt").write_text(" \n\n")
    (tmp_path / "none.jsonl").touch()
    for name, message in [
        ("missing.txt", "cannot read the prompts"),
        ("folder.txt", "cannot read the prompts"),
        ("blank.txt", "holds no prompts"),
        ("none.jsonl", "holds no prompts"),
        ("some.csv", "read from .txt"),
    ]:
        with pytest.raises(UserError, match=message):
            read(str(tmp_path / name), "train")


@given(st.lists(st.text().filter(str.strip), min_size=1, max_size=8))
def test_texts_survive_unchanged(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> None:
    path = tmp_path_factory.getbasetemp() / "hypothesis.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": text}) for text in texts))
    assert [row.messages[0]["content"] for row in read(str(path), "train")[0]] == texts
