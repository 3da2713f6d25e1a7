"""Replay: the acceptance that a served draft will have, predicted from captured features without decoding.

The unroll gives the draft's guess at every slot and step; an answer is then walked as a server would walk it. Teacher
forcing changes nothing here: a walk only ever uses a guess whose forerunners were right.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch

from eyas.config import Decode, Engine
from eyas.corpus.repeats import loops
from eyas.decode.acceptance import Tally, summary, walk
from eyas.draft import checkpoint
from eyas.draft.model import DraftModel
from eyas.draft.unroll import unroll
from eyas.engines import target as targets
from eyas.engines import weights
from eyas.engines.device import pick_device, use_threads
from eyas.files import write_json
from eyas.progress import Progress, Silent
from eyas.spec import StepSpec
from eyas.store.shard import Sample
from eyas.store.store import FeatureStore
from eyas.train.packing import group, pack

BATCH_TOKENS = 8192


@torch.inference_mode()
def tallies(draft: DraftModel, samples: Sequence[Sample], draft_tokens: int) -> list[Tally]:
    """The walk of each sample's answer (its last run of answer tokens), replayed together."""
    device = draft.fc.weight.device
    batch = pack(samples, draft_tokens, device, draft.fc.weight.dtype)
    chains, ids = batch.chains, torch.cat([s.ids for s in samples]).to(device)
    hits = torch.zeros(len(ids), draft_tokens, dtype=torch.int8, device=device)
    for step, hidden in enumerate(unroll(draft, chains, batch.aux)):
        counting = chains.depth > step
        slots = chains.slots[counting]
        guess = draft.target_ids[draft.logits(hidden[counting]).argmax(-1)]
        hits[slots, step] = (guess == ids[slots + 2 + step]).to(torch.int8)
    table, starts = hits.tolist(), [0, *accumulate(len(s.ids) for s in samples)]
    walks = []
    for sample, (start, end) in zip(samples, pairwise(starts), strict=True):
        first = len(sample.ids) - answer_length(sample)
        walks.append(walk(table[start:end], first, len(sample.ids), draft_tokens))
    return walks


def answer_length(sample: Sample) -> int:
    """Tokens of the sample's last run of answer tokens, which reaches its end."""
    assert bool(sample.answer[-1])
    return int(sample.answer.flip(0).to(torch.int64).cumprod(0).sum())


def prompt_ids(sample: Sample) -> list[int]:
    """The ids before the sample's last run of answer tokens."""
    ids: list[int] = sample.ids[: len(sample.ids) - answer_length(sample)].tolist()
    return ids


def replay(
    draft: DraftModel, store: FeatureStore, draft_tokens: int, rows: Sequence[int], progress: Progress
) -> Iterator[tuple[int, Sample, Tally]]:
    """Replay `rows` of a store: each with its sample and its walk."""
    lengths = store.lengths
    for batch in group([lengths[row] for row in rows], BATCH_TOKENS):
        samples = [store.sample(rows[i]) for i in batch]
        for i, sample, tally in zip(batch, samples, tallies(draft, samples, draft_tokens), strict=True):
            yield rows[i], sample, tally
        progress.advance(len(batch))


def pooled(walks: Sequence[tuple[Sequence[int], Tally]], draft_tokens: int) -> dict[str, Any]:
    """The *acceptance* of (answer ids, tally) pairs, looping rows apart."""
    plain, looping = Tally(draft_tokens), Tally(draft_tokens)
    for answer, tally in walks:
        (looping if loops(answer) else plain).add(tally)
    return summary(plain, looping)


def acceptance(draft: DraftModel, store: FeatureStore, draft_tokens: int) -> dict[str, Any]:
    """The *acceptance* of a draft on all answers of a store, with `draft_tokens` tokens a step."""
    walks = [
        (sample.ids[len(sample.ids) - answer_length(sample) :].tolist(), tally)
        for _, sample, tally in replay(draft, store, draft_tokens, range(len(store)), Silent())
    ]
    return pooled(walks, draft_tokens)


def spread(count: int, wanted: int | None) -> list[int]:
    """`wanted` of `count` row numbers, evenly spaced; all of them for None."""
    wanted = count if wanted is None else min(wanted, count)
    return [i * count // wanted for i in range(wanted)]


def load_draft(
    folder: Path, info: targets.TargetInfo, dtype: torch.dtype, device: torch.device, anyway: bool = False
) -> DraftModel:
    """A draft with the target's embeddings, read alone, on `device`; `anyway`: a faulty one too, as engines load it."""
    embedding = torch.nn.Embedding.from_pretrained(weights.embedding(info.folder).to(dtype))
    draft = checkpoint.load_anyway(folder, embedding) if anyway else checkpoint.load(folder, embedding, dtype)
    return draft.to(device)


def run(spec: StepSpec, out: Path, progress: Progress) -> dict[str, Any]:
    """Step entry: the exported draft on every held-out answer."""
    engine, decode = spec.section(Engine), spec.section(Decode)
    use_threads(engine)
    info = targets.read(spec.inputs["target"])
    device = pick_device(engine)
    store = FeatureStore.open(spec.inputs["capture"] / "heldout", target=info)
    draft = load_draft(spec.inputs["export"], info, torch.float32, device)
    progress.total(len(store), "answers")
    walks, rows = [], []
    for row, sample, tally in replay(draft, store, decode.draft_tokens, range(len(store)), progress):
        answer = sample.ids[len(sample.ids) - answer_length(sample) :].tolist()
        walks.append((answer, tally))
        rows.append({"row": row, "key": sample.key, "rounds": tally.rounds, "accepted": sum(tally.accepted)})
    write_json(out / "rows.json", rows)
    return pooled(walks, decode.draft_tokens)
