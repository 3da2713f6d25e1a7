"""`eyas replay`: the accept length of any draft, predicted from a draft folder and prompts alone.

Answers the prompts with the target in float32, keeping the states that the draft was made for, and replays the draft
on them. On the demo's draft and held-out prompts this gives the replay step's figure again.
"""

from collections import Counter
from pathlib import Path
from typing import Any

import torch

from eyas.capture.contract import Contract
from eyas.config import Engine
from eyas.corpus.read import counted, read
from eyas.corpus.render import Renderer
from eyas.corpus.step import keep
from eyas.decode.replay import load_draft, pooled, tallies
from eyas.draft.files import read_config
from eyas.draft.layers import layers_of
from eyas.engines import target as targets
from eyas.engines.answers import batches, to_sample
from eyas.engines.device import pick_device, use_threads
from eyas.engines.inprocess.generate import answer
from eyas.engines.inprocess.target import InProcessTarget
from eyas.errors import UserError
from eyas.progress import Progress

BATCH = 32


def predict(
    draft: Path,
    target: str,
    prompts: str | None,
    draft_tokens: int,
    limit: int | None,
    max_new_tokens: int | None,
    progress: Progress,
) -> dict[str, Any]:
    """The *acceptance* of a draft folder on prompts (`builtin` or a file), as docs/seams.md gives it.

    What is None is taken from the draft's config where eyas exported it, so that its run's figure comes out again; else
    it is the built-in held-out prompts, all of them, and 128 tokens. Raises UserError: draft, target or prompts
    unusable, made for each other no more, or nothing to count.
    """
    engine = Engine()
    use_threads(engine)
    device = pick_device(engine)
    config = read_config(draft)
    about = config.get("eyas") or {}
    recorded = about.get("heldout") or {}
    if prompts is None:
        prompts = str(recorded.get("prompts", "builtin"))
        limit = limit or recorded.get("limit")
    max_new_tokens = max_new_tokens or int(recorded.get("max_new_tokens", 128))
    info = targets.inspect(target, progress)
    targets.require_in_process(info)
    if about.get("contract"):
        Contract.from_dict(about["contract"], str(draft)).require_target(info, str(draft))
    layers = layers_of(config, info)
    rows, refused = read(prompts, "heldout", limit)
    render = Renderer(info, recorded.get("chat_template_kwargs", {}))
    context = info.text_config.get("max_position_embeddings")
    counts: Counter[str] = Counter()
    kept = keep(rows, render, context and context - max_new_tokens, set(), counts, progress, refused)
    if not kept:
        raise UserError(f"{prompts}: no usable prompt ({dict(counts + counted(refused))})")
    progress.milestone("loading target and draft")
    loaded = InProcessTarget(info, layers, torch.float32, device)
    drafter = load_draft(draft, info, torch.float32, device)
    progress.total(len(kept), "prompts")
    progress.milestone("answering and replaying")
    walks = []
    for part in batches([row["ids"] for row in kept], BATCH):
        answered = [a for a in answer(loaded, part, max_new_tokens, capture=torch.float32) if len(a.ids) - a.prompt > 1]
        samples = [to_sample(a) for a in answered]
        if samples:
            found = tallies(drafter, samples, draft_tokens)
            walks += [(a.ids[a.prompt :], tally) for a, tally in zip(answered, found, strict=True)]
        progress.advance(len(part))
    figures = pooled(walks, draft_tokens)
    if not figures["rounds"] and not figures["looping"]["rounds"]:
        raise UserError(f"{prompts}: no answer is long enough to draft in; use other prompts or --max-new-tokens")
    return figures
