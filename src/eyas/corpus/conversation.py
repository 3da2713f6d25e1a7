"""A conversation in the one form that templates take, and how messages come into it without loss.

Repaired and counted: names of roles, content in parts, arguments as text, old function calls, line ends, byte order
marks. What a repair would change the meaning of is rejected with a reason.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

ROLES = {
    "user": "user", "human": "user", "prompter": "user",
    "assistant": "assistant", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant",
    "bard": "assistant", "bing": "assistant", "ai": "assistant",
    "system": "system", "developer": "system",
    "tool": "tool", "function": "tool", "observation": "tool", "function_response": "tool", "tool_response": "tool",
    "function_call": "function_call", "tool_call": "function_call",
}  # fmt: skip
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
ROLE, PARTS, ARGUMENTS, CALL, LINE_ENDS, MARK, TOOLS, UNANSWERED = (
    "names of roles",
    "content in parts",
    "tool arguments as text",
    "forms of tool calls",
    "line ends",
    "byte order marks",
    "forms of tools",
    "last turn without an answer taken off",
)
"""Repairs, as they are counted."""


class Rejected(Exception):  # noqa: N818
    """A row that cannot be used: `reason` is counted, `detail` says more of this one."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason, self.detail = reason, detail


@dataclass(frozen=True)
class Conversation:
    """Messages as a chat template takes them: `role`, `content` (text), and `reasoning_content`, `tool_calls`, …"""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    form: str = ""
    """What is asked for (a poem, a table); empty if not known."""
    repairs: frozenset[str] = field(default=frozenset(), compare=False)

    @property
    def answers(self) -> list[int]:
        """Where the assistant speaks."""
        return [number for number, message in enumerate(self.messages) if message["role"] == "assistant"]


def conversation(messages: Sequence[Any], tools: Any = None, form: Any = "") -> Conversation:
    """Clean messages. Raises Rejected."""
    repairs: set[str] = set()
    if isinstance(tools, str):
        tools = _json(tools, "tools are not valid JSON") if tools.strip() else None
        repairs.add(TOOLS)
    cleaned = [_message(message, repairs) for message in messages]
    if not cleaned:
        raise Rejected("no messages")
    for number, message in enumerate(cleaned):
        _check(number, message, cleaned[number - 1]["role"] if number else "")
    form = form if isinstance(form, str) else ""
    return Conversation(cleaned, _tools(tools, repairs), form, frozenset(repairs))


def text(value: Any, repairs: set[str]) -> str:
    """A content as one text. Raises Rejected: it is none, or holds more than text."""
    if isinstance(value, list):
        parts = []
        for part in value:
            kind = part.get("type", "text") if isinstance(part, Mapping) else None
            found = part if isinstance(part, str) else part.get("text") if isinstance(part, Mapping) else None
            if not isinstance(found, str) or kind not in (None, "text", "input_text", "output_text"):
                raise Rejected("content with more than text", str(kind))
            parts.append(found)
        repairs.add(PARTS)
        value = "".join(parts)
    if not isinstance(value, str):
        raise Rejected("content is no text", type(value).__name__)
    return _plain(value, repairs)


def _plain(value: str, repairs: set[str]) -> str:
    if value.startswith("\ufeff"):
        repairs.add(MARK)
        value = value.removeprefix("\ufeff")
    if "\r" in value:
        repairs.add(LINE_ENDS)
        value = value.replace("\r\n", "\n").replace("\r", "\n")
    return value


def _message(raw: Any, repairs: set[str]) -> dict[str, Any]:
    if not isinstance(raw, Mapping):
        raise Rejected("a message is no object")
    said = raw.get("role", raw.get("from"))
    role = ROLES.get(said.strip().lower()) if isinstance(said, str) else None
    if role is None:
        raise Rejected("unknown role", str(said)[:50])
    if role != said:
        repairs.add(ROLE)
    content = next((raw[key] for key in ("content", "value", "text") if raw.get(key) is not None), "")
    calls: Any = raw.get("tool_calls")
    if role == "function_call":
        role, calls, content = "assistant", _json(text(content, repairs), "a tool call is not valid JSON"), ""
    elif raw.get("function_call"):
        calls = [raw["function_call"]]
    message: dict[str, Any] = {"role": role, "content": text(content, repairs)}
    thought = next((raw[key] for key in THOUGHTS if raw.get(key)), None)
    if thought is not None and role == "assistant":
        message["reasoning_content"] = text(thought, repairs)
    if calls:
        calls = calls if isinstance(calls, list) else [calls]
        message["tool_calls"] = [_call(call, repairs) for call in calls]
    for key in ("name", "tool_call_id"):
        if isinstance(raw.get(key), str) and raw[key]:
            message[key] = raw[key]
    return message


def _call(raw: Any, repairs: set[str]) -> dict[str, Any]:
    """One tool call, as `{"type": "function", "function": {"name", "arguments": object}}`, with its id."""
    function = raw.get("function", raw) if isinstance(raw, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise Rejected("a tool call without a function's name")
    if function is raw:
        repairs.add(CALL)
    arguments = function.get("arguments", function.get("parameters"))
    if isinstance(arguments, str):
        repairs.add(ARGUMENTS)
        arguments = _json(arguments, "tool arguments are not valid JSON") if arguments.strip() else {}
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise Rejected("tool arguments are no object")
    call: dict[str, Any] = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    return {"id": raw["id"], **call} if isinstance(raw.get("id"), str) else call


def _tools(tools: Any, repairs: set[str]) -> list[dict[str, Any]] | None:
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise Rejected("tools are no list of objects")
    if any("function" not in tool and "name" in tool for tool in tools):
        repairs.add(TOOLS)
    return [
        {"type": "function", "function": tool} if "function" not in tool and "name" in tool else tool for tool in tools
    ]


def _check(number: int, message: Mapping[str, Any], before: str) -> None:
    role = message["role"]
    if role == "system" and number:
        raise Rejected("a system message after the first place", f"message {number + 1}")
    if role == "assistant":
        if before in ("", "system"):
            raise Rejected("the assistant speaks first")
        if before == "assistant":
            raise Rejected("two assistant turns in a row", f"message {number + 1}")
    if not message["content"].strip():
        if role == "user":
            raise Rejected("an empty user turn", f"message {number + 1}")
        if role == "assistant" and not message.get("tool_calls"):
            raise Rejected("an empty assistant turn", f"message {number + 1}")


def _json(value: str, reason: str) -> Any:
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise Rejected(reason, str(error)) from error
