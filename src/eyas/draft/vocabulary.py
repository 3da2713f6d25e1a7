"""The draft vocabulary: the most frequent ids among the supervised tokens of the training set.

Part of the checkpoint from the first step on, never rebuilt on resume [SpecForge 534]. Stands between capture and
training.
"""

from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from eyas.config import Draft
from eyas.draft import checkpoint
from eyas.draft.config import DraftConfig
from eyas.engines import target as targets
from eyas.files import write_atomic
from eyas.progress import Progress
from eyas.spec import StepSpec
from eyas.store.store import FeatureStore

FILE = "vocabulary.safetensors"


def choose(counts: torch.Tensor, size: int) -> torch.Tensor:
    """The `size` most frequent ids, sorted: int64 [size]; `counts` int64 [V].

    Ties go to the smaller id; where fewer than `size` ids occur at all, unseen ones fill up [SpecForge 76].
    """
    assert 0 < size <= len(counts)
    order = torch.argsort(counts, descending=True, stable=True)
    return order[:size].sort().values


def read(folder: Path) -> torch.Tensor:
    """The chosen target ids, int64 [D], of a finished vocabulary step."""
    return safetensors.torch.load_file(folder / FILE)["target_ids"]


def run(spec: StepSpec, out: Path, progress: Progress) -> dict[str, Any]:
    """Step entry: count and choose; a draft that is trained on keeps its own."""
    info = targets.read(spec.inputs["target"])
    wanted, existing = spec.section(Draft).vocab_size, spec.section(Draft).existing
    store = FeatureStore.open(spec.inputs["capture"] / "train", target=info)
    counts = torch.zeros(info.vocab_size, dtype=torch.int64)
    progress.total(len(store), "samples")
    for i in range(len(store)):
        ids, answer = store.ids(i)
        counts += torch.bincount(ids[answer], minlength=info.vocab_size)
        progress.advance(1)
    if existing is not None:
        ids = checkpoint.vocabulary(Path(existing))
    else:
        ids = choose(counts, DraftConfig.from_target(info.config, wanted).draft_vocab_size)
    size = len(ids)
    write_atomic(out / FILE, safetensors.torch.save({"target_ids": ids}))
    return {"size": size, "coverage": float(counts[ids].sum() / counts.sum()), "distinct": int((counts > 0).sum())}
