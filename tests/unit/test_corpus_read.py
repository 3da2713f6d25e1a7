"""Prompt files: every form that is read, and every complaint."""

import codecs
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.corpus.builtin import load
from eyas.corpus.read import Row, counted, read
from eyas.errors import UserError


def jsonl(path: Path, *rows: Any) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_builtin() -> None:
    rows, refused = read("builtin", "heldout", 3)
    first = load("heldout")[0]
    assert rows[0] == Row([user(first.text)], first.form, "builtin/heldout:1")
    assert [row.source for row in rows] == [f"builtin/heldout:{number}" for number in (1, 2, 3)]
    assert not refused
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
    assert read(str(path), "train")[0] == [
        Row([user("x")], "poem", f"{path}:2"),
        Row(messages[:2], "", f"{path}:3"),
        Row(messages, "", f"{path}:3 turn 2"),
    ]


def test_each_answer_is_asked_for_again(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    call = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}],
    }
    talk = [user("a"), call, {"role": "tool", "content": "x"}, {"role": "assistant", "content": "b"}]
    name = jsonl(
        tmp_path / "x.jsonl", {"messages": talk, "tools": tools}, {"ids": [5, 6, 7, 8], "spans": [[1, 2], [3, 4]]}
    )
    assert read(name, "train")[0] == [
        Row(talk[:1], "", f"{name}:1", tools),
        Row(talk[:3], "", f"{name}:1 turn 2", tools),
        Row([], "", f"{name}:2", ids=[5]),
        Row([], "", f"{name}:2 turn 2", ids=[5, 6, 7]),
    ]


def test_folders(tmp_path: Path) -> None:
    jsonl(tmp_path / "b.jsonl", {"prompt": "x"})
    (tmp_path / "a.csv").write_text("question,answer\ny,z\n")
    rows, _ = read(str(tmp_path), "train")
    assert [(row.messages[0]["content"], row.source) for row in rows] == [
        ("y", f"{tmp_path}/a.csv:2"),
        ("x", f"{tmp_path}/b.jsonl:1"),
    ]


def test_rows_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    bad = [b"{", b"{}", b'{"prompt": " "}', b'{"prompt": "\\ud800"}', b"caf\xe9", b'{"messages": [{"role": "user"}]}']
    path.write_bytes(b"\n".join([b'{"prompt": "fine"}', *bad]))
    rows, refused = read(str(path), "train")
    assert len(rows) == 1
    assert [(row.line, row.reason) for row in refused] == [
        (2, "not valid JSON"),
        (3, "no known form"),
        (4, "an empty user turn"),
        (5, "half a surrogate pair"),
        (6, "not UTF-8 text"),
        (7, "an empty user turn"),
    ]
    assert counted(refused)["an empty user turn"] == 2


def test_limit_counts_rows_of_the_file(tmp_path: Path) -> None:
    name = jsonl(tmp_path / "x.jsonl", {"prompt": ""}, {"prompt": "one"}, 7)
    assert len(read(name, "train", 10**30)[0]) == 1
    rows, refused = read(name, "train", 2)
    assert (len(rows), len(refused)) == (1, 1)


def test_bad_files(tmp_path: Path) -> None:
    (tmp_path / "folder.txt").mkdir()
    (tmp_path / "blank.txt").write_text(" \n\n")
    (tmp_path / "none.jsonl").touch()
    (tmp_path / "some.md").touch()
    for name, message in [
        ("missing.txt", r"cannot read .*missing\.txt"),
        ("folder.txt", "holds no file that can be read"),
        ("blank.txt", "holds no prompts"),
        ("none.jsonl", "holds no prompts"),
        ("some.md", "data are read from .txt"),
    ]:
        with pytest.raises(UserError, match=message):
            read(str(tmp_path / name), "train")


@given(
    st.lists(
        st.text().filter(lambda text: text.strip() and "\r" not in text and text[0] != "\ufeff"), min_size=1, max_size=8
    )
)
def test_texts_survive_unchanged(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> None:
    path = tmp_path_factory.getbasetemp() / "hypothesis.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": text}) for text in texts))
    assert [row.messages[0]["content"] for row in read(str(path), "train")[0]] == texts
