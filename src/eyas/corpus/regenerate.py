"""`eyas regenerate`: conversations -> the same questions with the target's own answers.

Finished conversations are put down at once, in whatever order they come; stopped or killed, the same command asks only
for those that are missing, told by their content. At the end they are written in the data's order.
"""

import contextlib
import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from eyas.corpus.answering import Answerer
from eyas.corpus.conversation import Conversation, Rejected
from eyas.corpus.read import contents
from eyas.corpus.shapes import Tokens
from eyas.corpus.talk import Kit, Talk, is_answer
from eyas.datafiles import refuse_inputs
from eyas.digests import digest_json
from eyas.engines.sglang.http import ServerDied
from eyas.errors import UserError
from eyas.files import replacing
from eyas.progress import Progress

DURABLE_ROWS = 64
"""Rows after which the journal is forced to the disk."""
DUPLICATE = "exact duplicate"


def regenerate(
    names: Sequence[str],
    kit: Kit,
    answerer: Answerer,
    settings: dict[str, Any],
    out: Path,
    progress: Progress,
    limit: int | None = None,
    max_rejected: float = 0.05,
) -> dict[str, Any]:
    """Write the answered conversations of `names` to the file `out`; counts.

    `settings`: all that decides an answer beside the question (target, template, sampling). Raises UserError:
    unreadable, a server that refuses or has gone, more than `max_rejected` of the rows rejected.
    """
    journal = out.with_name(out.name + ".partial")
    if out.is_dir():
        raise UserError(f"{out}: is a folder; --out names a file, for example {out / 'own.jsonl'}")
    refuse_inputs(names, (out, journal, _rejected(out)))
    out.parent.mkdir(parents=True, exist_ok=True)
    done = _offsets(journal)
    resumed = len(done)
    total = sum(isinstance(content, Conversation) for _, _, content in _keyed(names, settings, limit))
    progress.total(total, "conversations", resumed)
    progress.milestone(f"answering {total - resumed} conversations")
    seen = set(done)

    def missing() -> Iterator[Talk]:
        for key, source, content in _keyed(names, settings, limit):
            if isinstance(content, Conversation) and key not in seen:
                seen.add(key)
                yield Talk(key, source, content, kit)

    try:
        with journal.open("ab") as file:
            for number, finished in enumerate(answerer(missing()), 1):
                why = finished.rejected
                row = {"key": finished.talk.key, "rows": finished.talk.rows()}
                if why is not None or not row["rows"]:
                    row |= {"reason": why.reason if why else "an empty answer", "detail": why.detail if why else ""}
                done[finished.talk.key] = file.tell()
                file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
                file.flush()
                if number % DURABLE_ROWS == 0:
                    os.fsync(file.fileno())
                progress.advance(1)
    except ServerDied as error:
        raise UserError(f"{error}; what is answered is kept: run the same command again to go on") from error
    report = _write(names, settings, limit, journal, done, out)
    report["resumed"] = resumed
    lost = sum(report["rejected"].values()) - report["rejected"].get(DUPLICATE, 0)
    if lost > max_rejected * report["rows"]:
        raise UserError(
            f"{lost} of {report['rows']} rows have no answer, more than {max_rejected:.1%}; they are in "
            f"{_rejected(out)}: mend the data, or allow more with --max-rejected"
        )
    return report


def _write(
    names: Sequence[str], settings: dict[str, Any], limit: int | None, journal: Path, done: dict[str, int], out: Path
) -> dict[str, Any]:
    """The journal's rows in the data's order, and those that have none."""
    counts: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    with replacing(_rejected(out)) as rejected, replacing(out) as file, journal.open("rb") as answered:

        def refuse(source: str, reason: str, detail: str) -> None:
            name, _, line = source.rpartition(":")
            reasons[reason] += 1
            row = {"file": name, "line": int(line), "reason": reason, "detail": detail}
            rejected.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")

        for key, source, content in _keyed(names, settings, limit):
            counts["rows"] += 1
            if isinstance(content, Rejected):
                refuse(source, content.reason, content.detail)
                continue
            if key not in done:
                reasons[DUPLICATE] += 1
                continue
            answered.seek(done.pop(key))
            found = json.loads(answered.readline())
            if "reason" in found:
                refuse(source, found["reason"], found["detail"])
            for row in found["rows"]:
                counts["samples"] += 1
                counts["tokens"] += sum(end - start for start, end in row.get("spans", []))
                counts["without_ids"] += "ids" not in row
                counts["cut"] += row["finish"] == "length"
                file.write(json.dumps({**row, "source": source}, ensure_ascii=False).encode() + b"\n")
    journal.unlink()
    return {**{name: counts[name] for name in ("rows", "samples", "tokens", "without_ids", "cut")}, "rejected": reasons}


def _keyed(
    names: Sequence[str], settings: dict[str, Any], limit: int | None
) -> Iterator[tuple[str, str, Conversation | Rejected]]:
    """Key, place and content of each row; a key covers all that an answer depends on, and no answer."""
    for file, line, content in islice((row for name in names for row in contents(name)), limit):
        source = f"{file}:{line}"
        if isinstance(content, Tokens):
            content = Rejected("token ids alone cannot be answered again")
        if isinstance(content, Rejected):
            yield "", source, content
            continue
        asked = [{"role": "assistant"} if is_answer(message) else message for message in content.messages]
        while is_answer(asked[-1]):
            asked.pop()
        yield digest_json({"messages": asked, "tools": content.tools, "settings": settings}), source, content


def _offsets(journal: Path) -> dict[str, int]:
    """Where each row of the journal begins; a line that was cut short is removed, so that the next one begins anew."""
    found: dict[str, int] = {}
    if not journal.exists():
        return found
    at = 0
    with journal.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                break
            # A block that the disk lost is asked for again.
            with contextlib.suppress(ValueError, KeyError, TypeError):
                found[json.loads(line)["key"]] = at
            at += len(line)
    os.truncate(journal, at)
    return found


def _rejected(out: Path) -> Path:
    return out.with_name(out.stem + ".rejected.jsonl")
