"""The prompts step: reads both prompt sets, renders them for the target, keeps each prompt once.

Writes train.jsonl and heldout.jsonl, in the order of their sources, a line
`{"key": prompt key, "ids": [...], "form": "poem", "source": "builtin/train:17"}`. A prompt that occurs in both sets
stays held out: what is measured must not have been learned.
"""

import importlib.metadata
import json
from collections import Counter
from pathlib import Path
from typing import Any

from eyas.config import Prompts, Target
from eyas.corpus.keys import prompt_key
from eyas.corpus.read import Row, read
from eyas.corpus.render import Renderer
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
    train, rejected = read(config.train, "train", config.train_limit)
    heldout, unusable = read(config.heldout, "heldout", config.heldout_limit)
    rejected += unusable
    progress.milestone("loading the tokenizer")
    render = Renderer(info, spec.section(Target).chat_template_kwargs)
    context = info.text_config.get("max_position_embeddings")
    progress.total(len(train) + len(heldout), "rows")
    kept = {"heldout": keep(heldout, render, context, set(), rejected, progress)}
    held = {row["key"] for row in kept["heldout"]}
    kept["train"] = keep(train, render, context, held, rejected, progress)
    for split, rows_kept in kept.items():
        if not rows_kept:
            raise UserError(f"prompts.{split}: no row of {getattr(config, split)} is left ({_counted(rejected)})")
        write_atomic(out / f"{split}.jsonl", "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows_kept))
    return {
        "train": len(kept["train"]),
        "heldout": len(kept["heldout"]),
        "rejected": dict(sorted(rejected.items())),
        "versions": {"transformers": importlib.metadata.version("transformers")},
    }


def keep(
    rows: list[Row], render: Renderer, context: int | None, held: set[str], rejected: Counter[str], progress: Progress
) -> list[dict[str, Any]]:
    """The rows rendered, less those that are counted into `rejected`: repeated, held out, too long to be answered."""
    kept: dict[str, dict[str, Any]] = {}
    for row in rows:
        ids = render(row)
        key = prompt_key(ids)
        if key in kept:
            rejected[DUPLICATE] += 1
        elif key in held:
            rejected[HELD_OUT] += 1
        elif context is not None and len(ids) >= context:
            rejected[TOO_LONG] += 1
        else:
            kept[key] = {"key": key, "ids": ids, "form": row.form, "source": row.source}
        progress.advance(1)
    return list(kept.values())


def _counted(rejected: Counter[str]) -> str:
    return ", ".join(f"{count} rejected: {reason}" for reason, count in sorted(rejected.items()))
