"""A draft on disk: config.json and one model.safetensors, in the layout that SGLang loads.

SGLang's loader skips names it does not know and leaves missing ones uninitialised, both in silence [sglang 27908]; here
the set of names is exact in both directions.
"""

from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import nn

from eyas.digests import digest_bytes
from eyas.draft.config import ARCHITECTURE, DraftConfig
from eyas.draft.files import read_config, read_tensors
from eyas.draft.model import DraftModel
from eyas.draft.start import STD
from eyas.errors import UserError
from eyas.files import write_atomic, write_json

WEIGHTS = "model.safetensors"


def shapes(c: DraftConfig) -> dict[str, tuple[int, ...]]:
    """The tensors of a checkpoint, and their shapes."""
    h, inner, query, key = c.hidden_size, c.intermediate_size, c.num_attention_heads, c.num_key_value_heads
    norms = ["input_layernorm", "hidden_norm", "post_attention_layernorm"]
    vectors = ["norm.weight", *(f"midlayer.{name}.weight" for name in norms)]
    vectors += [f"fc_norm.{i}.weight" for i in range(3)] if c.fc_norm else []
    return {
        "fc.weight": (h, 3 * h),
        "midlayer.self_attn.q_proj.weight": (query * c.head_dim, 2 * h),
        "midlayer.self_attn.k_proj.weight": (key * c.head_dim, 2 * h),
        "midlayer.self_attn.v_proj.weight": (key * c.head_dim, 2 * h),
        "midlayer.self_attn.o_proj.weight": (h, query * c.head_dim),
        "midlayer.mlp.gate_proj.weight": (inner, h),
        "midlayer.mlp.up_proj.weight": (inner, h),
        "midlayer.mlp.down_proj.weight": (h, inner),
        "lm_head.weight": (c.draft_vocab_size, h),
        "d2t": (c.draft_vocab_size,),
        "t2d": (c.vocab_size,),
        **dict.fromkeys(vectors, (h,)),
    }


def names(c: DraftConfig) -> set[str]:
    """The tensors of a checkpoint."""
    return set(shapes(c))


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


def vocabulary(folder: Path) -> torch.Tensor:
    """The target ids of a checkpoint, int64 [D], sorted. Raises UserError as `load`; also where they are not sorted."""
    d2t = _read(folder, DraftConfig.from_hf(read_config(folder)))["d2t"]
    ids = d2t + torch.arange(len(d2t))
    if not bool((ids[1:] > ids[:-1]).all()) or int(ids[0]) < 0:
        raise UserError(f"{folder / WEIGHTS}: its vocabulary is not sorted; it cannot be trained on here")
    return ids


def load_anyway(folder: Path, embed_tokens: nn.Embedding) -> DraftModel:
    """Load a checkpoint as an engine does: what is there and fits is taken, the rest is left random, in silence.

    float32. Raises UserError: files missing or damaged, or a config.json without the layer's sizes.
    """
    given, state = read_config(folder), read_tensors(folder)
    size = given.get("draft_vocab_size") or len(state.get("d2t", state.get("lm_head.weight", [])))
    draft = DraftModel(
        DraftConfig.from_hf({**given, "architectures": [ARCHITECTURE], "draft_vocab_size": size}), embed_tokens
    )
    generator = torch.Generator().manual_seed(0)
    for name, own in draft.state_dict().items():
        there = state.get(name)
        if name == "embed_tokens.weight":
            continue
        if there is not None and there.shape == own.shape:
            own.copy_(there)
        elif own.is_floating_point() and own.dim() == 2:
            own.copy_(torch.randn(own.shape, generator=generator) * STD)
    if "t2d" not in state:
        draft.t2d.copy_(marked(draft.d2t, draft.config.vocab_size))
    return draft.eval()


def marked(d2t: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """The `t2d`, bool [V], that belongs to offsets `d2t` [D]; ids outside count as the nearest one inside."""
    ids = d2t + torch.arange(len(d2t), device=d2t.device)
    mask = torch.zeros(vocab_size, dtype=torch.bool, device=d2t.device)
    mask[ids.clamp(0, vocab_size - 1)] = True
    return mask


def _read(folder: Path, config: DraftConfig) -> dict[str, torch.Tensor]:
    path, state, wanted = folder / WEIGHTS, read_tensors(folder), names(config)
    if "d2t" not in state and config.draft_vocab_size == config.vocab_size:
        state["d2t"] = torch.zeros(config.vocab_size, dtype=torch.int64)
    if "t2d" not in state and "d2t" in state and len(state["d2t"]) == config.draft_vocab_size:
        state["t2d"] = marked(state["d2t"], config.vocab_size)
    if missing := sorted(wanted - set(state)):
        raise UserError(f"{path}: {', '.join(missing)} missing; an engine would leave them uninitialised")
    if unknown := sorted(set(state) - wanted - {"embed_tokens.weight"}):
        raise UserError(f"{path}: unknown tensors {', '.join(unknown)}; an engine would skip them in silence")
    state.pop("embed_tokens.weight", None)
    if spoiled := sorted(n for n, t in state.items() if t.is_floating_point() and not bool(t.isfinite().all())):
        raise UserError(f"{path}: {', '.join(spoiled)} holds numbers that are not finite; train or download it again")
    return state
