"""A row of data -> a conversation, whatever shape people keep it in.

The shape is told by the row's own keys, so that one file may hold several. `SHAPES` are tried in order: the first
that knows the row names it.
"""

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eyas.corpus.conversation import Conversation, Rejected, conversation

Fields = Mapping[str, Any]
PAIRS = (
    ("prompt", "response"), ("prompt", "completion"), ("prompt", "answer"), ("prompt", "output"), ("prompt", "chosen"),
    ("question", "answer"), ("question", "response"), ("query", "response"), ("query", "answer"),
    ("problem", "solution"), ("input", "output"), ("user", "assistant"),
)  # fmt: skip
PROMPTS = ("prompt", "question", "query", "instruction", "text")
IDS, MASKS = ("ids", "input_ids"), ("mask", "loss_mask", "assistant_masks")
IGNORED = -100
"""In `labels`: no loss here (the convention of PyTorch)."""


@dataclass(frozen=True)
class Tokens:
    """A row that is tokenised already: `spans` are the supervised stretches, each [start, end)."""

    ids: list[int]
    spans: list[tuple[int, int]]


Shaped = Conversation | Tokens


def parse(line: bytes, text: bool) -> list[Any]:
    """The rows of a line: one, or those of a JSON array on it. Raises Rejected: no UTF-8, no JSON."""
    try:
        decoded = line.decode()
    except UnicodeDecodeError as error:
        raise Rejected("not UTF-8 text", f"{error.reason} at byte {error.start}") from error
    if text:
        return [{"prompt": decoded}]
    try:
        value = json.loads(decoded)
        if "\\u" in decoded:
            json.dumps(value, ensure_ascii=False).encode()  # fails on half a surrogate pair, which no tokenizer takes
    except UnicodeEncodeError as error:
        raise Rejected("half a surrogate pair", str(error.reason)) from error
    except (ValueError, RecursionError) as error:
        raise Rejected("not valid JSON", str(error)) from error
    return value if isinstance(value, list) and not _are_messages(value) else [value]


def shape(row: Any) -> tuple[str, Shaped]:
    """What form a row has, and its content. Raises Rejected."""
    if _are_messages(row):
        row = {"messages": row}
    if isinstance(row, str):
        row = {"prompt": row}
    if not isinstance(row, Mapping):
        raise Rejected("not a JSON object", type(row).__name__)
    for name, find in SHAPES:
        found = find(row)
        if found is not None:
            return name, found
    raise Rejected("no known form", "keys: " + (", ".join(map(str, row))[:200] or "none"))


def _are_messages(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(_is_message(item) for item in value)


def _is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and ("role" in value or "from" in value)


def _tokens(row: Fields) -> Tokens | None:
    ids = next((row[key] for key in IDS if key in row), None)
    if ids is None:
        return None
    if not _ints(ids) or not ids:
        raise Rejected("ids are no list of numbers")
    if "spans" in row:
        spans = row["spans"]
        if not isinstance(spans, list) or not all(_ints(span) and len(span) == 2 for span in spans):
            raise Rejected("spans are no list of pairs")
        if not all(0 <= start < end <= len(ids) for start, end in spans) or any(
            before[1] > after[0] for before, after in itertools.pairwise(spans)
        ):
            raise Rejected("spans outside the ids, or out of order")
        return Tokens(ids, [(start, end) for start, end in spans])
    mask = next((row[key] for key in MASKS if key in row), None)
    if mask is None and _ints(row.get("labels")):
        mask = [label != IGNORED for label in row["labels"]]
        if any(flag and label != token for flag, label, token in zip(mask, row["labels"], ids, strict=False)):
            raise Rejected("labels differ from the ids", "they must not be shifted")
    if not isinstance(mask, list) or not _ints(mask) or not set(mask) <= {0, 1}:
        raise Rejected("ids without a mask", "mask, loss_mask, labels or spans")
    if len(mask) != len(ids):
        raise Rejected("ids and mask differ in length", f"{len(ids)} and {len(mask)}")
    return Tokens(ids, runs(mask))


def runs(mask: Sequence[int]) -> list[tuple[int, int]]:
    """The stretches where a mask is set, each [start, end)."""
    edges = [i for i in range(len(mask) + 1) if bool(i and mask[i - 1]) != bool(i < len(mask) and mask[i])]
    return list(zip(edges[::2], edges[1::2], strict=True))


def _ints(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int or type(item) is bool for item in value)


def _messages(row: Fields) -> Conversation | None:
    return _listed(row, "role")


def _sharegpt(row: Fields) -> Conversation | None:
    return _listed(row, "from")


def _listed(row: Fields, role: str) -> Conversation | None:
    """Messages under one of their usual names, of which each says its role under `role`."""
    for key in ("messages", "conversations", "conversation"):
        messages = row.get(key)
        if isinstance(messages, str) and messages[:1] == "[":
            try:
                messages = json.loads(messages)
            except ValueError as error:
                raise Rejected("messages are not valid JSON", str(error)) from error
        if isinstance(messages, list) and (role == "role" or (messages and _has(messages[0], role))):
            if role == "role" and messages and _has(messages[0], "from"):
                return None
            system = row.get("system")
            named = _has(messages[0], "role") and messages[0]["role"] == "system" if messages else False
            before = [_said("system", system)] if isinstance(system, str) and system and not named else []
            return conversation([*before, *messages], row.get("tools"), row.get("form"))
    return None


def _has(message: Any, key: str) -> bool:
    return isinstance(message, Mapping) and key in message


def _alternating(row: Fields) -> Conversation | None:
    """UltraChat's first form: texts of user and assistant in turns."""
    texts = row.get("data")
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        return None
    return conversation([_said(("user", "assistant")[number % 2], text) for number, text in enumerate(texts)])


def _alpaca(row: Fields) -> Conversation | None:
    if "instruction" not in row or "output" not in row:
        return None
    return _exchange(row, _asked(row), row["output"])


def _pair(row: Fields) -> Conversation | None:
    for asked, answered in PAIRS:
        if row.get(asked) and row.get(answered) is not None:
            return _exchange(row, row[asked], row[answered])
    return None


def _prompt(row: Fields) -> Conversation | None:
    for key in PROMPTS:
        if row.get(key) is not None:
            return _exchange(row, _asked(row) if key == "instruction" else row[key], None)
    return None


def _asked(row: Fields) -> Any:
    """Alpaca's instruction with its input, as Alpaca itself joins them: an empty line between."""
    instruction, given = row["instruction"], row.get("input")
    return (
        f"{instruction}\n\n{given}"
        if isinstance(instruction, str) and isinstance(given, str) and given
        else instruction
    )


def _exchange(row: Fields, asked: Any, answered: Any) -> Conversation:
    """Messages of a prompt and its answer, each of which may be a list of messages itself."""
    messages: list[Any] = []
    system, history = row.get("system"), row.get("history")
    if isinstance(system, str) and system:
        messages.append(_said("system", system))
    for turn in history if isinstance(history, list) else []:
        if not isinstance(turn, list) or len(turn) != 2:
            raise Rejected("history is no list of pairs")
        messages += [_said("user", turn[0]), _said("assistant", turn[1])]
    messages += asked if _are_messages(asked) else [_said("user", asked)]
    if answered is not None:
        messages += answered if _are_messages(answered) else [_said("assistant", answered)]
    return conversation(messages, row.get("tools"), row.get("form"))


def _said(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


SHAPES: tuple[tuple[str, Callable[[Fields], Shaped | None]], ...] = (
    ("ids", _tokens),
    ("sharegpt", _sharegpt),
    ("messages", _messages),
    ("alternating", _alternating),
    ("alpaca", _alpaca),
    ("pair", _pair),
    ("prompt", _prompt),
)
"""Names of forms, and what finds them: None where the row has another."""
