"""A draft of random weights: it costs a server what a trained one of its shape costs, and is right by chance alone."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from eyas.config import Capture, Draft
from eyas.draft import checkpoint, start
from eyas.draft.config import DraftConfig
from eyas.draft.export import layer_ids
from eyas.draft.model import DraftModel
from eyas.engines import layers, weights
from eyas.engines import target as targets
from eyas.progress import Progress
from eyas.spec import StepSpec


def run(spec: StepSpec, out: Path, progress: Progress) -> dict[str, Any]:
    """Step entry: a draft of random weights for the target, as an export would write it."""
    progress.milestone("writing random weights")
    info, section, capture = targets.read(spec.inputs["target"]), spec.section(Draft), spec.section(Capture)
    stored = weights.embedding(info.folder)
    size = info.vocab_size if isinstance(section.vocab_size, str) else min(section.vocab_size, info.vocab_size)
    config = DraftConfig.from_target(info.config, size, fc_norm=section.fc_norm, norm_output=section.norm_output)
    draft = DraftModel(config, nn.Embedding.from_pretrained(stored.float()))
    ids = torch.arange(size)
    draft.set_vocabulary(ids)
    generator = torch.Generator().manual_seed(spec.seed)
    # Shuffled rows: the target's own head on random states would still be right now and then.
    head = weights.head(info.folder)[ids[torch.randperm(size, generator=generator)]].float()
    start.random(draft, head, torch.ones(info.hidden_size), generator)
    wanted = layers.resolve(capture.layers, capture.convention, info.num_layers)
    eagle = config.to_hf(str(stored.dtype))["eagle_config"]
    checkpoint.save(out, draft, stored.dtype, layer_ids(eagle, wanted, info.architecture, info.num_layers))
    return {"vocab_size": size}
