"""Reads prompts: the built-in ones, or a file of the user's own.

`.txt` holds a prompt a line. `.jsonl` holds an object a line, with either `prompt`, a text, or `messages`, a list of
`{"role", "content"}` that ends with the user; a text `form` may say what is asked for; other keys are ignored. Blank
lines are skipped. What is not of this form is an error that names file and line; what is, but cannot be asked, is
rejected and counted.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from eyas.corpus import builtin
from eyas.errors import UserError

EMPTY, NOT_USER = "empty prompt", "does not end with the user"


@dataclass(frozen=True)
class Row:
    """One question to the target."""

    messages: list[dict[str, Any]]
    form: str
    """What is asked for (a poem, a table); empty if not known."""
    source: str
    """Where it stands: `builtin/train:17`, `my/prompts.jsonl:3`."""


def read(name: str, split: builtin.Split, limit: int | None = None) -> tuple[list[Row], Counter[str]]:
    """The usable ones of the first `limit` rows of a prompt set, and how many were rejected for which reason.

    `name` is `builtin`, of which `split` is taken, or a file. Raises UserError: no such file, neither .txt nor .jsonl,
    not UTF-8, empty, or a line that is no prompt.
    """
    rows = _builtin(split) if name == "builtin" else _file(name)
    usable: list[Row] = []
    rejected: Counter[str] = Counter()
    for row in islice(rows, limit):
        reason = _unusable(row)
        if reason:
            rejected[reason] += 1
        else:
            usable.append(row)
    if not usable and not rejected:
        raise UserError(f"{name}: holds no prompts; put a prompt on each line, or take the built-in ones (builtin)")
    return usable, rejected


def _builtin(split: builtin.Split) -> Iterator[Row]:
    for number, prompt in enumerate(builtin.load(split), start=1):
        yield Row(_asked(prompt.text), prompt.form, f"builtin/{split}:{number}")


def _file(name: str) -> Iterator[Row]:
    parsers: dict[str, Callable[[str, str], Row]] = {".txt": _plain, ".jsonl": _object}
    path = Path(name).expanduser()
    parse = parsers.get(path.suffix.lower())
    if parse is None:
        raise UserError(f"{name}: prompts are read from .txt (a prompt a line) or .jsonl files, or give `builtin`")
    try:
        with path.open("rb") as file:
            # Lines end with \n only: texts may hold other Unicode line separators.
            for number, raw in enumerate(file, start=1):
                where = f"{name}:{number}"
                try:
                    line = raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()
                except UnicodeDecodeError as error:
                    raise UserError(f"{where}: not UTF-8 text ({error.reason}); save the file as UTF-8") from error
                if line:
                    yield parse(line, where)
    except OSError as error:
        raise UserError(f"{name}: cannot read the prompts ({error.strerror})") from error


def _plain(line: str, where: str) -> Row:
    return Row(_asked(line), "", where)


def _object(line: str, where: str) -> Row:
    try:
        # Encoding fails on half a surrogate pair, which no tokenizer takes.
        fields = json.loads(line)
        json.dumps(fields, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not a JSON object ({error})") from error
    if not isinstance(fields, dict):
        raise UserError(f'{where}: not a JSON object; write {{"prompt": "…"}} on each line')
    form = fields.get("form") or ""
    if not isinstance(form, str):
        raise UserError(f"{where}: form must be a text")
    match fields.get("prompt"), fields.get("messages"):
        case (str(prompt), None):
            return Row(_asked(prompt), form, where)
        case (None, list(messages)) if messages and all(map(_is_message, messages)):
            return Row(messages, form, where)
        case (None, None):
            raise UserError(f"{where}: has neither prompt nor messages")
        case (None, _):
            raise UserError(f"{where}: messages must be a list of objects with the texts role and content")
        case (_, None):
            raise UserError(f"{where}: prompt must be a text")
    raise UserError(f"{where}: has both prompt and messages; keep one")


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str) and isinstance(value.get("content"), str)


def _asked(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def _unusable(row: Row) -> str | None:
    last = row.messages[-1]
    if last["role"] != "user":
        return NOT_USER
    return None if last["content"].strip() else EMPTY
