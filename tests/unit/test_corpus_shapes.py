"""Rows of every shape become the same conversation; what cannot, is rejected with its reason."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.corpus.conversation import (
    ARGUMENTS,
    CALL,
    LINE_ENDS,
    MARK,
    PARTS,
    ROLE,
    TOOLS,
    Conversation,
    Rejected,
)
from eyas.corpus.shapes import Tokens, parse, runs, shape


def said(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def called(call: dict[str, Any]) -> list[dict[str, Any]]:
    return [said("user", "Q"), said("assistant", "", tool_calls=[call])]


TALK = [said("user", "Q"), said("assistant", "A")]
FIRST = [said("system", "S"), *TALK]
OLD = [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]
SHAPES: list[tuple[str, Any, list[dict[str, Any]]]] = [
    ("messages", {"messages": TALK, "prompt": "Q", "prompt_id": 7}, TALK),
    ("messages", {"conversations": TALK}, TALK),
    ("messages", TALK, TALK),
    ("messages", {"system": "S", "messages": TALK}, FIRST),
    ("messages", {"system": "S", "messages": FIRST}, FIRST),
    ("messages", {"messages": json.dumps(TALK)}, TALK),
    ("sharegpt", {"conversations": OLD}, TALK),
    ("sharegpt", {"system": "S", "conversations": OLD}, FIRST),
    ("alternating", {"id": 1, "data": ["Q", "A"]}, TALK),
    ("alpaca", {"instruction": "Q", "input": "", "output": "A"}, TALK),
    ("alpaca", {"instruction": "I", "input": "G", "output": "A"}, [said("user", "I\n\nG"), TALK[1]]),
    ("alpaca", {"instruction": "Q", "output": "A", "system": "S", "history": [["1", "2"]]},
     [FIRST[0], said("user", "1"), said("assistant", "2"), *TALK]),
    ("pair", {"prompt": "Q", "response": "A"}, TALK),
    ("pair", {"prompt": [said("user", "Q")], "completion": [said("assistant", "A")]}, TALK),
    ("pair", {"question": "Q", "answer": "A"}, TALK),
    ("pair", {"input": "Q", "output": "A"}, TALK),
    ("prompt", {"prompt": "Q", "form": "poem"}, TALK[:1]),
    ("prompt", "Q", TALK[:1]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "row", "messages"), SHAPES)
def test_shapes(name: str, row: Any, messages: list[dict[str, Any]]) -> None:
    found, content = shape(row)
    assert isinstance(content, Conversation)
    assert (found, content.messages) == (name, messages)


def test_repairs_are_made_and_named() -> None:
    call = {"id": "1", "function": {"name": "f", "arguments": '{"a": 1}'}}
    row = {
        "messages": [
            said("human", [{"type": "text", "text": "\ufeffa\r\n"}, "b"]),
            said("assistant", None, tool_calls=[call]),
            said("tool", "x", tool_call_id="1", name="f"),
            said("assistant", "", function_call={"name": "f", "arguments": {}}),
            {"from": "observation", "value": "y"},
            {"role": "assistant", "content": "done", "reasoning": "why", "weight": 1},
        ],
        "tools": '[{"name": "f", "parameters": {}}]',
    }
    _, found = shape(row)
    assert isinstance(found, Conversation)
    made = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    assert found.messages == [
        said("user", "a\nb"),
        said("assistant", "", tool_calls=[{"id": "1", **made}]),
        said("tool", "x", tool_call_id="1", name="f"),
        said("assistant", "", tool_calls=[{"type": "function", "function": {"name": "f", "arguments": {}}}]),
        said("tool", "y"),
        said("assistant", "done", reasoning_content="why"),
    ]
    assert found.tools == [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    assert found.repairs == {ROLE, PARTS, MARK, LINE_ENDS, ARGUMENTS, CALL, TOOLS}
    assert shape({"messages": TALK})[1].repairs == frozenset()  # type: ignore[union-attr]


def test_arguments_as_text_or_object_are_the_same() -> None:
    """Pitfall 25."""
    both = [
        shape({"messages": called({"name": "f", "arguments": given})})[1]
        for given in ('{"b": 1, "a": "é"}', {"b": 1, "a": "é"})
    ]
    assert both[0] == both[1]


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "no messages"),
        (["x"], "a message is no object"),
        ([said("wizard", "x")], "unknown role"),
        ([said(None, "x")], "unknown role"),  # type: ignore[arg-type]
        ([said("user", 3)], "content is no text"),
        ([said("user", {"text": "x"})], "content is no text"),
        ([said("user", [{"type": "image_url", "image_url": "x"}])], "content with more than text"),
        ([said("user", None), TALK[1]], "an empty user turn"),
        ([TALK[0], said("assistant", " \n")], "an empty assistant turn"),
        ([TALK[0], said("assistant", None), *TALK], "an empty assistant turn"),
        ([*TALK, TALK[1]], "two assistant turns in a row"),
        ([*TALK, said("system", "S"), *TALK], "a system message after the first place"),
        ([TALK[1], *TALK], "the assistant speaks first"),
        (called({"id": "1"}), "a tool call without a function's name"),
        (called({"name": "f", "arguments": "{"}), "tool arguments are not valid JSON"),
        (called({"name": "f", "arguments": "[1]"}), "tool arguments are no object"),
    ],
)  # fmt: skip
def test_what_cannot_be_repaired(messages: list[Any], reason: str) -> None:
    """Pitfall 26."""
    with pytest.raises(Rejected) as caught:
        shape({"messages": messages})
    assert caught.value.reason == reason


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (7, "not a JSON object"),
        (None, "not a JSON object"),
        ({}, "no known form"),
        ({"messages": "hi"}, "no known form"),
        ({"ids": [1, 2]}, "ids without a mask"),
        ({"ids": [1, 2], "mask": [1]}, "ids and mask differ in length"),
        ({"ids": [1, 2], "mask": [1, 2]}, "ids without a mask"),
        ({"ids": [1, 2], "labels": [2, -100]}, "labels differ from the ids"),
        ({"ids": [1, "2"], "mask": [1, 1]}, "ids are no list of numbers"),
        ({"ids": [1, 2], "spans": [[0, 3]]}, "spans outside the ids, or out of order"),
        ({"ids": [1, 2], "spans": [[1, 2], [0, 1]]}, "spans outside the ids, or out of order"),
        ({"ids": [1, 2], "spans": [1]}, "spans are no list of pairs"),
    ],
)
def test_rows_that_are_none(row: Any, reason: str) -> None:
    with pytest.raises(Rejected) as caught:
        shape(row)
    assert caught.value.reason == reason


@pytest.mark.parametrize(
    "row",
    [
        {"ids": [5, 6, 7], "mask": [0, 1, 1]},
        {"input_ids": [5, 6, 7], "loss_mask": [False, True, True], "attention_mask": [1, 1, 1]},
        {"input_ids": [5, 6, 7], "labels": [-100, 6, 7]},
        {"ids": [5, 6, 7], "spans": [[1, 3]], "key": "x", "source": "a:1"},
    ],
)
def test_ids_are_kept(row: dict[str, Any]) -> None:
    """Pitfall 29: never decoded and encoded again."""
    assert shape(row) == ("ids", Tokens([5, 6, 7], [(1, 3)]))


@given(st.lists(st.booleans()))
def test_runs(mask: list[bool]) -> None:
    found = runs(mask)
    assert [any(a <= i < b for a, b in found) for i in range(len(mask))] == mask
    assert all(a < b for a, b in found)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b'{"prompt": "\\ud800"}', "half a surrogate pair"),
        (b'{"prompt": "caf\xe9"}', "not UTF-8 text"),
    ],
)
def test_lines_that_are_no_json(line: bytes, reason: str) -> None:
    """Pitfall 27."""
    with pytest.raises(Rejected) as caught:
        parse(line, text=False)
    assert caught.value.reason == reason


def test_rows_of_a_line() -> None:
    assert parse(b'{"a": 1}', text=False) == [{"a": 1}]
    assert parse(b'[{"a": 1}, {"b": 2}]', text=False) == [{"a": 1}, {"b": 2}]
    assert parse(json.dumps(TALK).encode(), text=False) == [TALK]
    assert parse("é".encode(), text=True) == [{"prompt": "é"}]
