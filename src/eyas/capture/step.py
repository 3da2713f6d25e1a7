"""The capture step: what the answers step kept is proven, sample by sample, and becomes two feature stores.

Every sample runs through the cheap proofs; a share is captured again, alone and by plain prefill, and compared. A
sample that fails is quarantined with its reason; above a small share the run stops. Stands between answers and
training; `train/` and `heldout/` in its output are stores.
"""

import shutil
from pathlib import Path
from typing import Any

import torch
import transformers

from eyas.capture import keep
from eyas.capture.contract import FORMAT, Contract
from eyas.capture.proofs import Proofs, require_share
from eyas.config import Capture, Store
from eyas.engines.answers import SPLITS, Targets
from eyas.engines.inprocess.target import InProcessTarget
from eyas.errors import UserError
from eyas.progress import Progress
from eyas.spec import StepSpec
from eyas.store.manifest import Quarantined
from eyas.store.shard import Sample, Shard

AHEAD = 32
"""Samples whose head products are computed together."""


def run(spec: StepSpec, out: Path, progress: Progress) -> dict[str, Any]:
    """Step entry. Raises UserError: too many samples failed, or a split is left without any."""
    config = spec.section(Capture)
    progress.milestone("loading the target")
    targets = Targets(spec)
    batches = spec.inputs["answers"] / "batches"
    result = keep.nothing()
    shards = {split: [Shard(path) for path in sorted(batches.glob(f"{split}-*.safetensors"))] for split in SPLITS}
    progress.total(sum(len(s) for split in SPLITS for s in shards[split]), "samples")
    for split in SPLITS:
        progress.milestone(f"proving {split} samples")
        target = targets.get(split)
        quarantined, proofs = prove(shards[split], target, config.proof_share, progress)
        total = sum(map(len, shards[split]))
        require_share(quarantined, total, config.max_quarantined)
        if total == len(quarantined):
            raise UserError(
                f"capture: no {split} sample is left; every answer was empty: are the prompts ones it answers?"
            )
        kept = keep.without(shards[split], {q.key for q in quarantined}, out / f"mended-{split}")
        dtype = keep.stored(spec.section(Store), kept[0].dtype)
        if split == "train" and dtype != kept[0].dtype:
            progress.milestone("coding train samples")
            kept = keep.recoded(kept, out / "recoded", dtype)
        keep.add_store(result, out / split, contract(targets, split, kept[0]), kept, quarantined)
        keep.add_proofs(result, proofs)
    for scratch in ("mended-train", "mended-heldout", "recoded"):
        shutil.rmtree(out / scratch, ignore_errors=True)
    return result


def prove(
    shards: list[Shard], target: InProcessTarget, share: float, progress: Progress
) -> tuple[list[Quarantined], Proofs]:
    """Run all proofs over shards of the target's own greedy answers; every 1/share-th sample is captured again."""
    proofs = Proofs(target.head)
    every = max(1, round(1 / share))
    failed, number = [], 0
    for part in shards:
        damaged = set(part.verify())
        for i in range(len(part)):
            if i % AHEAD == 0:
                proofs.look_ahead([part.sample(j) for j in range(i, min(i + AHEAD, len(part)))])
            sample = part.sample(i)
            reason = "its bytes are not those that were written" if sample.key in damaged else proofs.check(sample)
            if reason is None and number % every == 0:
                reason = proofs.check_again(sample, capture_alone(target, sample))
            if reason is not None:
                failed.append(Quarantined(sample.key, reason))
            number += 1
            progress.advance(1)
    return failed, proofs


def capture_alone(target: InProcessTarget, sample: Sample) -> Sample:
    """The sample's states from one plain pass over its ids, nothing beside it."""
    out = target.run(sample.ids[None].to(target.device), target.cache(1, len(sample.ids)))
    return Sample(sample.key, sample.ids, sample.answer, out.aux[0].cpu(), out.last[0].cpu(), sample.argmax)


def contract(targets: Targets, split: str, shard: Shard) -> Contract:
    """What the states of a split are."""
    info = targets.info
    return Contract(
        format=FORMAT,
        model_digest=info.model_digest,
        tokenizer_digest=info.tokenizer_digest,
        template_digest=info.template_digest,
        layers=targets.layers,
        last_is_normed=True,
        dtype=str(shard.dtype).removeprefix("torch."),
        hidden_size=info.hidden_size,
        vocab_size=info.vocab_size,
        engine="transformers",
        engine_version=transformers.__version__,
        flags={"computed_in": str(targets.dtype(split)).removeprefix("torch."), "torch": torch.__version__},
    )
