"""The answers step of an SGLang run: the target's own greedy answers, given by its server.

Token ids end to end: what the server returns as `output_ids` is the answer, its end token included. Rows are written as
they come, in any order, and a later attempt asks only for those that are missing, by prompt key [SpecForge regenerate].
No states yet: the capture step sends the whole rows again.
"""

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from eyas.config import Answers, Server
from eyas.corpus.keys import prompt_key
from eyas.corpus.repeats import loops
from eyas.engines import target as targets
from eyas.engines.sglang import client, info
from eyas.engines.sglang.http import Connection
from eyas.engines.sglang.info import ServerInfo
from eyas.engines.sglang.pool import fan_out
from eyas.engines.sglang.server import endpoints
from eyas.errors import UserError
from eyas.files import write_atomic
from eyas.progress import Progress
from eyas.spec import StepSpec

SPLITS = ("train", "heldout")
JOURNAL = "answered.jsonl"
DURABLE_ROWS = 64
"""Rows after which the journal is forced to the disk."""
TIMEOUT = 3600.0


@dataclass(frozen=True)
class Prompt:
    """A prompt to be answered with up to `longest` tokens."""

    split: str
    key: str
    ids: list[int]
    longest: int


@dataclass(frozen=True)
class Answered:
    """A prompt with its answer: `ids` are both, `prompt` of them the prompt's; `finish` is "stop" or "length"."""

    split: str
    key: str
    ids: list[int]
    prompt: int
    finish: str

    @property
    def answer(self) -> list[int]:
        """The answer alone."""
        return self.ids[self.prompt :]


def run(spec: StepSpec, out: Path, progress: Progress) -> dict[str, Any]:
    """Step entry; leases `server`. Writes answers/train.jsonl and answers/heldout.jsonl, in the prompts' order."""
    config, server = spec.section(Answers), spec.section(Server)
    target = targets.read(spec.inputs["target"])
    ends = endpoints(spec.services["server"])
    with client.leased():
        about = [info.read(end.url) for end in ends]
        prompts, too_long = fitting(spec.inputs["prompts"], config, min(map(room, about)))
        for prompt in prompts:
            client.check_ids(prompt.ids, target.vocab_size, f"prompt {prompt.key}")
        done = {(row.split, row.key): row for row in read_journal(out / JOURNAL)}
        left = [prompt for prompt in prompts if (prompt.split, prompt.key) not in done]
        progress.total(
            sum(prompt.longest for prompt in prompts),
            "tokens",
            sum(prompt.longest for prompt in prompts) - sum(prompt.longest for prompt in left),
        )
        progress.milestone("answering prompts")
        longest = {(prompt.split, prompt.key): prompt.longest for prompt in left}
        urls, eos = [end.url for end in ends], target.eos_token_ids
        with (out / JOURNAL).open("ab") as journal:
            for number, row in enumerate(answer(urls, left, eos, target.vocab_size, server.concurrency)):
                write_row(journal, row, durable=number % DURABLE_ROWS == 0)
                done[row.split, row.key] = row
                # What an answer falls short of its limit need not be waited for.
                progress.advance(longest[row.split, row.key])
    (out / "answers").mkdir(exist_ok=True)
    rows = {split: [done[p.split, p.key] for p in prompts if p.split == split] for split in SPLITS}
    for split in SPLITS:
        write_atomic(out / "answers" / f"{split}.jsonl", "".join(map(to_line, rows[split])))
    (out / JOURNAL).unlink()
    return figures(rows) | {"too_long": too_long, "versions": {"sglang": about[0].version}}


def room(about: ServerInfo) -> int:
    """Most tokens of a prompt and its answer that a server takes."""
    longest = [about.context_length, about.kv_tokens, about.longest_input or about.context_length]
    # The capture asks for one more token behind the whole row.
    return min(longest) - 1


def fitting(folder: Path, config: Answers, most: int) -> tuple[list[Prompt], int]:
    """The prompts that leave room for a whole answer, and how many do not. Raises UserError: a split has none."""
    longest = {"train": config.max_new_tokens, "heldout": config.heldout_max_new_tokens or config.max_new_tokens}
    kept: dict[tuple[str, str], Prompt] = {}
    too_long = 0
    for split in SPLITS:
        with (folder / f"{split}.jsonl").open(encoding="utf-8") as file:
            for line in file:
                row = json.loads(line)
                key = row.get("key") or prompt_key(row["ids"])
                if len(row["ids"]) + longest[split] > most:
                    too_long += 1
                else:
                    kept[split, key] = Prompt(split, key, row["ids"], longest[split])
        if not any(prompt.split == split for prompt in kept.values()):
            raise UserError(
                f"answers: no {split} prompt leaves room for {longest[split]} new tokens in the server's {most}: lower "
                "answers.max_new_tokens, shorten the prompts, or give the server more (context-length, "
                "mem-fraction-static, max-total-tokens in server.args)"
            )
    return list(kept.values()), too_long


def answer(
    urls: Sequence[str], prompts: Iterable[Prompt], eos: Sequence[int], vocab_size: int, concurrency: int
) -> Iterator[Answered]:
    """Greedy answers, as they are finished. Raises UserError: refused, or a reply without ids. ServerDied."""

    def work(connection: Connection, server: int, prompt: Prompt) -> Answered:
        reply = client.ask(connection, body(prompt.ids, prompt.longest, eos), TIMEOUT)
        ids, finish = answer_of(connection.url, reply, eos, vocab_size)
        return Answered(prompt.split, prompt.key, [*prompt.ids, *ids], len(prompt.ids), finish)

    return fan_out(urls, prompts, work, concurrency=concurrency)


def body(ids: Sequence[int], longest: int, eos: Sequence[int]) -> dict[str, Any]:
    """What is asked for a greedy answer."""
    sampling = {"temperature": 0, "max_new_tokens": longest, "stop_token_ids": list(eos)}
    return {"input_ids": list(ids), "sampling_params": sampling}


def answer_of(url: str, reply: dict[str, Any], eos: Sequence[int], vocab_size: int) -> tuple[list[int], str]:
    """The ids of an answer, its end token included, and how it ended. Raises UserError: the reply has none."""
    ids, meta = reply.get("output_ids"), reply.get("meta_info")
    reason = meta.get("finish_reason") if isinstance(meta, dict) else None
    if not isinstance(ids, list) or not isinstance(reason, dict):
        raise UserError(f"{url}: replies lack output_ids or finish_reason: update SGLang")
    finish, matched = str(reason.get("type")), reason.get("matched")
    if finish == "stop" and isinstance(matched, int) and (not ids or ids[-1] != matched):
        ids = [*ids, matched]
    client.check_ids(ids, vocab_size, f"an answer of {url}")
    return ids, finish


def read(folder: Path, split: str) -> list[Answered]:
    """The answers of a split, from the step's output."""
    path = folder / "answers" / f"{split}.jsonl"
    return [_from_line(split, line) for line in path.read_bytes().splitlines()]


def read_journal(path: Path) -> Iterator[Answered]:
    """What an earlier attempt wrote; a line that was cut short is removed, so that the next one begins anew."""
    if not path.exists():
        return
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole != len(data):
        os.truncate(path, whole)
    for line in data[:whole].splitlines():
        try:
            yield _from_line("", line)
        except (ValueError, KeyError):
            continue  # a block that the disk lost: those rows are asked again


def write_row(file: BinaryIO, row: Answered, durable: bool) -> None:
    """Append a row to the journal."""
    file.write(json.dumps({"split": row.split, **_fields(row)}, separators=(",", ":")).encode() + b"\n")
    file.flush()
    if durable:
        os.fsync(file.fileno())


def to_line(row: Answered) -> str:
    """A row as it stands in the output."""
    return json.dumps(_fields(row), separators=(",", ":")) + "\n"


def figures(rows: dict[str, list[Answered]]) -> dict[str, int]:
    """Counts, as the in-process answers step gives them."""
    every = [row for split in SPLITS for row in rows[split]]
    return {
        "rows": len(rows["train"]),
        "tokens": sum(len(row.answer) for row in rows["train"]),
        "heldout_rows": len(rows["heldout"]),
        "heldout_tokens": sum(len(row.answer) for row in rows["heldout"]),
        "empty": sum(len(row.answer) < 2 for row in every),
        "looping": sum(loops(row.answer) for row in every),
    }


def _fields(row: Answered) -> dict[str, Any]:
    return {"key": row.key, "ids": row.ids, "prompt": row.prompt, "finish": row.finish}


def _from_line(split: str, line: bytes) -> Answered:
    row = json.loads(line)
    return Answered(row.get("split", split), row["key"], row["ids"], row["prompt"], row["finish"])
