"""The tiny twin: a random model of the target's own class and config, with few layers and small widths.

What decides which code of a server runs is kept: the class and its nesting, attention (grouped heads or MLA, head
sizes), rope and its scaling, dense and expert layers, routing, tied embeddings. What only makes it large is cut.
Weights are written in the target's own naming, rounded to bfloat16, so that they are the same numbers in any dtype.
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from eyas.draft import checkpoint, start
from eyas.draft.config import DraftConfig
from eyas.draft.export import layer_ids
from eyas.draft.model import DraftModel
from eyas.engines import weights
from eyas.engines.layers import default_layers
from eyas.engines.sglang.twinconfig import quantised, shrink
from eyas.engines.target import TargetInfo
from eyas.files import read_json, write_json

ALIASES = {"kimi_k2": "deepseek_v3"}
"""Model types of configs that transformers knows under another name."""


@dataclass(frozen=True)
class Twin:
    """A twin on disk, and the same in memory where transformers knows the class."""

    info: TargetInfo
    reference: Any
    """The float32 transformers model, or None: then there are no weights in the folder, only a config."""
    notes: tuple[str, ...]
    """In which ways it is unlike the target."""


def make(info: TargetInfo, folder: Path, tp: int, seed: int = 0) -> Twin:
    """Write the twin of a target into `folder`, for `tp` tensor-parallel ranks. Equal arguments give equal weights."""
    config = shrink(info.config, tp)
    text = config.get("text_config") or config
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", config)
    twin = dataclasses.replace(
        info,
        folder=folder,
        config=config,
        num_layers=text["num_hidden_layers"],
        hidden_size=text["hidden_size"],
        vocab_size=text["vocab_size"],
        eos_token_ids=(text["vocab_size"] - 1,),
        model_digest="twin",
    )
    notes = []
    if quantised(info.config):
        notes.append("unquantised, the target is not")
    why = f"transformers does not know {info.architecture}"
    try:
        reference = build(text, info.architecture, seed)
    except Exception as error:
        # Hundreds of classes, each with its own way to refuse a config.
        said = str(error).strip().splitlines() or [type(error).__name__]
        reference, why = None, f"transformers refuses the config ({said[-1].strip()[:200]})"
    if reference is None:
        notes.append(f"dummy weights, so no layer's identity is proven: {why}")
    else:
        save(reference, folder, *prefixes(info))
    return Twin(twin, reference, tuple(notes))


def model_type(text: dict[str, Any], architecture: str) -> str | None:
    """transformers' name for the language model that `text` describes; None if it has none."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as KNOWN

    said = text.get("model_type", "")
    named = (text.get("architectures") or [architecture])[0]
    of_class = [kind for kind, names in KNOWN.items() if named in ((names,) if isinstance(names, str) else names)]
    candidates = [said, ALIASES.get(said, ""), f"{said}_text", *of_class]
    return next((kind for kind in candidates if kind in KNOWN), None)


@torch.no_grad()
def build(text: dict[str, Any], architecture: str, seed: int) -> Any:
    """The language model in float32, with random weights; None where transformers does not know it."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    kind = model_type(text, architecture)
    if kind is None:
        return None
    about = ("model_type", "auto_map", "architectures", "dtype", "torch_dtype")
    fields = {key: value for key, value in text.items() if key not in about}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = AutoConfig.for_model(kind, **fields)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    for name, module in model.named_modules():
        # transformers norms latents with 1e-6 whatever the config says, SGLang with what it says.
        if name.endswith(("q_a_layernorm", "kv_a_layernorm")) and hasattr(module, "variance_epsilon"):
            module.variance_epsilon = config.rms_norm_eps
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in sorted(model.state_dict(keep_vars=True).items()):
        if tensor.is_floating_point() and not (name.endswith("lm_head.weight") and config.tie_word_embeddings):
            tensor.copy_(_random(name, tensor, generator).bfloat16().float())
    return model.eval().requires_grad_(False)


def _random(name: str, tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Layers that change the state clearly and rounding errors hardly; norms and biases differ from their neutral."""
    noise = torch.randn(tensor.shape, generator=generator)
    if tensor.dim() < 2:
        return tensor + 0.1 * noise
    if "embed_tokens" in name:
        return noise
    looks = any(part in name for part in (".q_", ".k_", ".kv_", ".qkv_"))
    return noise * (0.5 if looks else 0.8) * tensor.shape[-1] ** -0.5


def prefixes(info: TargetInfo) -> tuple[str, str]:
    """What stands for `model.` and for `lm_head.` in the names of the target's own files."""
    nested = "text_config" in info.config
    body, head = ("language_model.model.", "language_model.lm_head.") if nested else ("model.", "lm_head.")
    for name in _names(info.folder):
        if name.endswith("embed_tokens.weight") and "vision" not in name:
            body = name.removesuffix("embed_tokens.weight")
        elif name.endswith("lm_head.weight"):
            head = name.removesuffix("weight")
    return body, head


def _names(folder: Path) -> list[str]:
    """The names of a model folder's tensors; none if it has no weights."""
    from safetensors import safe_open

    if (folder / weights.INDEX).exists():
        return list(read_json(folder / weights.INDEX)["weight_map"])
    if not (folder / weights.SINGLE).exists():
        return []
    with safe_open(folder / weights.SINGLE, "pt") as file:
        return list(file.keys())


def save(model: Any, folder: Path, body: str, head: str) -> None:
    """Write the model's weights under the names of the target's class, as bfloat16."""
    from safetensors.torch import load_file, save_file

    scratch = folder / "plain"
    model.save_pretrained(scratch)
    written = {}
    for path in sorted(scratch.glob("*.safetensors")):
        for name, tensor in load_file(path).items():
            is_head = name.startswith("lm_head.")
            place = head + name.removeprefix("lm_head.") if is_head else body + name.removeprefix("model.")
            written[place] = tensor if "e_score_correction_bias" in name else tensor.bfloat16()
        path.unlink()
    for path in scratch.iterdir():
        path.unlink()
    scratch.rmdir()
    save_file(written, folder / weights.SINGLE, metadata={"format": "pt"})


@torch.inference_mode()
def states(model: Any, ids: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
    """All hidden states of `ids` int64 [T], float32 [T, H] each, and the logits [T, V].

    The first state is the embedding, the last one is that after the final norm.
    """
    out = model(input_ids=ids[None], output_hidden_states=True, use_cache=False)
    return [state[0] for state in out.hidden_states], out.logits[0].float()


def write_draft(twin: Twin, tp: int, layers: tuple[int, int, int] | None, folder: Path) -> None:
    """A random draft for the twin, with half of its vocabulary and heads as a draft of the target would have."""
    groups = max(2, tp)
    shape = DraftConfig.from_target(twin.info.config, twin.info.vocab_size // 2)
    shape = dataclasses.replace(shape, num_attention_heads=2 * groups, num_key_value_heads=groups, head_dim=64)
    generator = torch.Generator().manual_seed(0)
    known = torch.randperm(shape.vocab_size, generator=generator)[: shape.draft_vocab_size].sort().values
    if twin.reference is not None:
        table, head = twin.reference.get_input_embeddings().weight, twin.reference.lm_head.weight
    else:
        table = head = torch.randn(shape.vocab_size, shape.hidden_size, generator=generator)
    draft = DraftModel(shape, nn.Embedding.from_pretrained(table.float()))
    start.random(draft, head[known].float(), torch.ones(shape.hidden_size), generator)
    draft.set_vocabulary(known)
    wanted = layers or default_layers(twin.info.num_layers)
    eagle = shape.to_hf("bfloat16")["eagle_config"]
    folder.mkdir(parents=True)
    extra = layer_ids(eagle, wanted, twin.info.architecture, twin.info.num_layers)
    checkpoint.save(folder, draft, torch.bfloat16, extra)
