"""A draft on disk: config.json and one model.safetensors, in the layout that SGLang loads.

SGLang's loader skips names it does not know and leaves missing ones uninitialised, both in silence [sglang 27908]; here
the set of names is exact in both directions.
"""

from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import nn

from eyas.digests import digest_bytes
from eyas.draft.config import DraftConfig
from eyas.draft.model import DraftModel
from eyas.errors import UserError
from eyas.files import read_json, write_atomic, write_json

WEIGHTS = "model.safetensors"


def names(c: DraftConfig) -> set[str]:
    """The tensors of a checkpoint."""
    attention = {f"midlayer.self_attn.{p}_proj.weight" for p in "qkvo"}
    mlp = {f"midlayer.mlp.{p}_proj.weight" for p in ("gate", "up", "down")}
    norms = {f"midlayer.{n}.weight" for n in ("input_layernorm", "hidden_norm", "post_attention_layernorm")}
    chunks = {f"fc_norm.{i}.weight" for i in range(3)} if c.fc_norm else set()
    return attention | mlp | norms | chunks | {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"}


def tensors(draft: DraftModel) -> dict[str, torch.Tensor]:
    """The checkpoint's tensors of a draft in memory."""
    state = {
        k: v.detach().cpu().contiguous() for k, v in draft.state_dict().items() if not k.startswith("embed_tokens")
    }
    assert set(state) == names(draft.config)
    return state


def digest(draft: DraftModel) -> str:
    """Digest of all tensors with their names, dtypes and shapes; equal drafts give equal digests on any machine."""
    return digest_bytes(safetensors.torch.save(dict(sorted(tensors(draft).items()))))


def save(folder: Path, draft: DraftModel, dtype: torch.dtype, extra: dict[str, Any] | None = None) -> None:
    """Write a checkpoint into an existing folder; floating tensors become `dtype`; `extra` goes into config.json.

    Reads it back and compares every tensor. Raises UserError where what was written cannot be read.
    """
    cast = {k: v.to(dtype) if v.is_floating_point() else v for k, v in tensors(draft).items()}
    write_atomic(folder / WEIGHTS, safetensors.torch.save(dict(sorted(cast.items())), metadata={"format": "pt"}))
    write_json(folder / "config.json", draft.config.to_hf(str(dtype).removeprefix("torch.")) | (extra or {}))
    again = _read(folder, draft.config)
    for name, tensor in cast.items():
        if not torch.equal(again[name], tensor):
            raise UserError(f"{folder / WEIGHTS}: {name} does not read back as written; the disk may be faulty")


def load(folder: Path, embed_tokens: nn.Embedding, dtype: torch.dtype | None = None) -> DraftModel:
    """Load a checkpoint, ours or another tool's, with the target's embeddings; `dtype` converts it.

    Raises UserError: files missing or damaged, tensors missing, unknown, not finite or of the wrong shape, a vocabulary
    map that is none.
    """
    config = DraftConfig.from_hf(read_config(folder))
    state = _read(folder, config)
    rows, width = embed_tokens.weight.shape
    if width != config.hidden_size or rows < config.vocab_size:
        raise UserError(
            f"{folder}: made for a target with {config.vocab_size} tokens of width {config.hidden_size}, "
            f"this target has {rows} of width {width}"
        )
    draft = DraftModel(config, embed_tokens)
    expected = draft.state_dict()
    for name, tensor in state.items():
        if tensor.shape != expected[name].shape:
            raise UserError(
                f"{folder / WEIGHTS}: {name} is {list(tensor.shape)}, expected {list(expected[name].shape)}"
            )
    draft.load_state_dict(state | {"embed_tokens.weight": embed_tokens.weight}, assign=False)
    ids = draft.target_ids
    inside = bool(((ids >= 0) & (ids < config.vocab_size)).all())
    if not inside or not bool(draft.t2d[ids].all()) or int(draft.t2d.sum()) != len(ids.unique()):
        raise UserError(f"{folder / WEIGHTS}: d2t and t2d do not agree; the vocabulary map is damaged [EAGLE 222]")
    if dtype is not None:
        for module in (
            draft.fc,
            draft.midlayer,
            draft.norm,
            draft.lm_head,
            *([draft.fc_norm] if config.fc_norm else []),
        ):
            module.to(dtype)
    return draft.eval()


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a draft folder. Raises UserError where there is none."""
    path = folder / "config.json"
    if not path.is_file():
        raise UserError(f"{folder}: no config.json; give the folder of an exported EAGLE-3 draft")
    config = read_json(path)
    if not isinstance(config, dict):
        raise UserError(f"{path}: not a JSON object")
    return config


def _read(folder: Path, config: DraftConfig) -> dict[str, torch.Tensor]:
    path = folder / WEIGHTS
    try:
        state = safetensors.torch.load_file(path)
    except (OSError, safetensors.SafetensorError) as error:
        raise UserError(f"{path}: missing or damaged ({error}); export the draft again") from error
    wanted = names(config)
    if "t2d" not in state and "d2t" in state and len(state["d2t"]) == config.draft_vocab_size:
        state["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool)
        ids = state["d2t"] + torch.arange(config.draft_vocab_size)
        state["t2d"][ids.clamp(0, config.vocab_size - 1)] = True
    if missing := sorted(wanted - set(state)):
        raise UserError(f"{path}: {', '.join(missing)} missing; an engine would leave them uninitialised")
    if unknown := sorted(set(state) - wanted - {"embed_tokens.weight"}):
        raise UserError(f"{path}: unknown tensors {', '.join(unknown)}; an engine would skip them in silence")
    state.pop("embed_tokens.weight", None)
    if spoiled := sorted(n for n, t in state.items() if t.is_floating_point() and not bool(t.isfinite().all())):
        raise UserError(f"{path}: {', '.join(spoiled)} holds numbers that are not finite; train or download it again")
    return state
