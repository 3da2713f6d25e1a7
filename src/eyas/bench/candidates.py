"""The candidates step: existing drafts, replayed on the captured held-out answers before anything is trained."""

from pathlib import Path
from typing import Any

import torch

from eyas.config import Decode, Engine
from eyas.decode.replay import acceptance, load_draft
from eyas.draft.layers import require_layers
from eyas.engines import target as targets
from eyas.engines.device import pick_device, use_threads
from eyas.errors import UserError
from eyas.progress import Progress
from eyas.spec import StepSpec
from eyas.store.store import FeatureStore


def run(spec: StepSpec, out: Path, progress: Progress) -> dict[str, Any]:
    """Step entry. `candidates`: of each folder in `drafts` its accept length, or the problem that keeps it from one;
    `best`: the folder that reaches most, null where none does."""
    use_threads(spec.section(Engine))
    target = targets.read(spec.inputs["target"])
    store = FeatureStore.open(spec.inputs["capture"] / "heldout", target=target)
    draft_tokens, device = spec.section(Decode).draft_tokens, pick_device(spec.section(Engine))
    progress.total(len(spec.config["drafts"]), "drafts")
    found: list[dict[str, Any]] = []
    for folder in spec.config["drafts"]:
        try:
            length = accept_length(Path(folder), target, store, draft_tokens, device)
            found.append({"folder": folder, "accept_length": length, "problem": None})
        except UserError as error:
            found.append({"folder": folder, "accept_length": None, "problem": str(error)})
        progress.advance(1)
    usable = [one for one in found if one["accept_length"] is not None]
    best = max(usable, key=lambda one: float(one["accept_length"]), default=None)
    return {"candidates": found, "best": best["folder"] if best else None, "draft_tokens": draft_tokens}


def accept_length(
    folder: Path, target: targets.TargetInfo, store: FeatureStore, draft_tokens: int, device: torch.device
) -> float:
    """Replay of a draft on all answers of a store. Raises UserError: it cannot be loaded, or needs other states."""
    require_layers(folder, target, store.contract)
    draft = load_draft(folder, target, torch.float32, device)
    return float(acceptance(draft, store, draft_tokens)["accept_length"])
