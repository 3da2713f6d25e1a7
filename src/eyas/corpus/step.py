"""The prompts step: reads both prompt sets, renders them for the target, keeps each prompt once.

Writes train.jsonl and heldout.jsonl, in the order of their sources, a line
`{"key": prompt key, "ids": [...], "form": "poem", "source": "builtin/train:17"}`, and rejected.jsonl as `eyas prepare`
does. A prompt that occurs in both sets
stays held out: what is measured must not have been learned.
"""

import importlib.metadata
import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from eyas.config import Data, Prompts, Target
from eyas.corpus.keys import prompt_key
from eyas.corpus.read import Refused, Row, counted, read
from eyas.corpus.render import Renderer, Unrenderable
from eyas.engines import target
from eyas.errors import UserError
from eyas.files import write_atomic
from eyas.progress import Progress
from eyas.spec import StepSpec

DUPLICATE, HELD_OUT, TOO_LONG = "duplicate", "also held out", "longer than the target's context"


def run(spec: StepSpec, out: Path, progress: Progress) -> dict[str, Any]:
    """Step entry. Raises UserError: a prompt set that cannot be read or rendered, or of which nothing is left."""
    config = spec.section(Prompts)
    info = target.read(spec.inputs["target"])
    read_rows = {
        split: read(getattr(config, split), split, getattr(config, f"{split}_limit")) for split in ("train", "heldout")
    }
    progress.milestone("loading the tokenizer")
    render = Renderer(info, spec.section(Target).chat_template_kwargs)
    context = info.text_config.get("max_position_embeddings")
    progress.total(sum(len(rows) for rows, _ in read_rows.values()), "rows")
    counts: Counter[str] = Counter()
    refused = [row for _, rows in read_rows.values() for row in rows]
    kept: dict[str, list[dict[str, Any]]] = {}
    for split in ("heldout", "train"):
        held = {row["key"] for row in kept.get("heldout", [])}
        kept[split] = keep(read_rows[split][0], render, context, held, counts, progress, refused)
    write_atomic(out / "rejected.jsonl", "".join(map(_line, map(asdict, refused))))
    counts += counted(refused)
    for split in ("train", "heldout"):
        if not kept[split]:
            raise UserError(f"prompts.{split}: no row of {getattr(config, split)} is left ({_counted(counts)})")
    rows, most = sum(map(len, kept.values())) + counts.total(), spec.section(Data).max_rejected
    if len(refused) > most * rows:
        first = refused[0]
        raise UserError(
            f"prompts: {len(refused)} of {rows} rows cannot be used, more than {most:.1%} "
            f"({_counted(counted(refused))}), first {first.file}:{first.line} {first.detail}; all of them are in "
            f"{out / 'rejected.jsonl'}: mend them, or allow more with data.max_rejected"
        )
    for split, rows_kept in kept.items():
        write_atomic(out / f"{split}.jsonl", "".join(map(_line, rows_kept)))
    return {
        "train": len(kept["train"]),
        "heldout": len(kept["heldout"]),
        "rejected": dict(sorted(counts.items())),
        "versions": {"transformers": importlib.metadata.version("transformers")},
    }


def keep(
    rows: list[Row],
    render: Renderer,
    context: int | None,
    held: set[str],
    counts: Counter[str],
    progress: Progress,
    refused: list[Refused],
) -> list[dict[str, Any]]:
    """The rows rendered, less those that are counted (repeated, held out, too long to be answered) or refused."""
    kept: dict[str, dict[str, Any]] = {}
    for row in rows:
        progress.advance(1)
        try:
            ids = render(row)
        except Unrenderable as error:
            file, _, line = row.source.partition(" turn ")[0].rpartition(":")
            refused.append(Refused(file, int(line), error.reason, error.detail))
            continue
        key = prompt_key(ids)
        if key in kept:
            counts[DUPLICATE] += 1
        elif key in held:
            counts[HELD_OUT] += 1
        elif context is not None and len(ids) >= context:
            counts[TOO_LONG] += 1
        else:
            kept[key] = {"key": key, "ids": ids, "form": row.form, "source": row.source}
    return list(kept.values())


def _line(row: dict[str, Any]) -> str:
    return json.dumps(row, ensure_ascii=False) + "\n"


def _counted(rejected: Counter[str]) -> str:
    return ", ".join(f"{count} rejected: {reason}" for reason, count in sorted(rejected.items()))
