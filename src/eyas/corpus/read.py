"""Reads prompts: the built-in ones, or whatever data a user has, of which each answer's question is a prompt.

A conversation of several turns gives a prompt for each answer in it, and one for a last question that has none; what
was said before is what the data have. Rows that cannot be used are left out, each with file, line and reason.
"""

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from eyas.corpus import builtin, files
from eyas.corpus.conversation import Conversation, Rejected
from eyas.corpus.shapes import Tokens, parse, shape
from eyas.datafiles import BUILTIN, expand
from eyas.errors import UserError


@dataclass(frozen=True)
class Row:
    """One question to the target."""

    messages: list[dict[str, Any]]
    form: str
    """What is asked for (a poem, a table); empty if not known."""
    source: str
    """Where it stands: `builtin/train:17`, `my/prompts.jsonl:3`, `my/talks.jsonl:3 turn 2`."""
    tools: list[dict[str, Any]] | None = None
    ids: list[int] | None = None
    """The rendered ids, where the data have these instead of messages."""


@dataclass(frozen=True)
class Refused:
    """A row that cannot be used."""

    file: str
    line: int
    reason: str
    detail: str


def read(name: str, split: builtin.Split, limit: int | None = None) -> tuple[list[Row], list[Refused]]:
    """The prompts in the first `limit` rows of some data, and the rows that cannot be used.

    `name` is `builtin`, of which `split` is taken, a file, folder, glob or data set. Raises UserError: nothing there,
    no row in it.
    """
    usable: list[Row] = []
    refused: list[Refused] = []
    for file, line, content in islice(contents(name, split), limit and min(limit, sys.maxsize)):
        if isinstance(content, Rejected):
            refused.append(Refused(file, line, content.reason, content.detail))
        else:
            usable += questions(content, f"{file}:{line}")
    if not usable and not refused:
        raise UserError(f"{name}: holds no prompts; put a prompt on each line, or take the built-in ones (builtin)")
    return usable, refused


def questions(content: Conversation | Tokens, source: str) -> list[Row]:
    """What the target is asked in a conversation, turn by turn."""
    if isinstance(content, Tokens):
        prompts = [content.ids[:start] for start, _ in content.spans if start]
        rows = [Row([], "", source, ids=ids) for ids in prompts]
    else:
        messages = content.messages
        asked = [*content.answers, *([] if messages[-1]["role"] == "assistant" else [len(messages)])]
        rows = [Row(messages[:number], content.form, source, content.tools) for number in asked]
    return [
        row if number == 1 else Row(row.messages, row.form, f"{source} turn {number}", row.tools, row.ids)
        for number, row in enumerate(rows, 1)
    ]


def counted(refused: Sequence[Refused]) -> Counter[str]:
    """How many for which reason."""
    return Counter(row.reason for row in refused)


def contents(name: str, split: builtin.Split = "train") -> Iterator[tuple[str, int, Conversation | Tokens | Rejected]]:
    """File, line and content of each row of some data, or why it cannot be used. Raises UserError: unreadable."""
    if name == BUILTIN:
        for number, prompt in enumerate(builtin.load(split), start=1):
            message = {"role": "user", "content": prompt.text}
            yield f"builtin/{split}", number, Conversation([message], form=prompt.form)
        return
    for path in expand(name):
        for block in files.blocks(path):
            for number, line in block.numbered():
                try:
                    values = parse(line, block.text)
                except Rejected as reason:
                    values = [reason]
                for value in values:
                    yield path, number, _shaped(value)


def _shaped(value: Any) -> Conversation | Tokens | Rejected:
    try:
        return value if isinstance(value, Rejected) else shape(value)[1]
    except Rejected as reason:
        return reason
