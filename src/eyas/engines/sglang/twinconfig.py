"""A target's config.json made small: what decides which code of a server runs is kept, what makes it large is cut."""

import copy
import math
from typing import Any

from eyas.errors import UserError

LAYERS = 8
VOCABULARY = 1024
HIDDEN = 256
INNER = 256
"""Width of an MLP."""
EXPERTS = 32
DENSE = 3
"""Most layers that stay dense before the first with experts."""
HEADS = 16
"""Most heads of latent attention on a rank."""
DEEPSEEK = {"moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "ep_size": 1}
"""What SGLang reads of a DeepSeek V3 config and transformers leaves out when it saves one."""


def shrink(config: dict[str, Any], tp: int) -> dict[str, Any]:
    """The twin's config.json: `config` with few layers, small widths and a small vocabulary.

    Raises UserError where a size that is needed is not there.
    """
    small = copy.deepcopy(config)
    text = small.get("text_config") or small
    for part in (small, text):
        part.pop("quantization_config", None)
        part.pop("compression_config", None)
    if text is not small:
        # SGLang 0.5.23 then wants no image processor, which would need files of the target.
        small["language_model_only"] = True
    vision = small.get("vision_config")
    try:
        _shrink_depth(text)
        _shrink_attention(text, tp)
        _shrink_experts(text, tp)
    except (KeyError, TypeError, ZeroDivisionError) as error:
        raise UserError(
            f"config.json: no tiny twin of this config can be made ({error}); set server.twin to false"
        ) from error
    text["vocab_size"] = min(text["vocab_size"], VOCABULARY)
    if "vocab_size" in small:
        small["vocab_size"] = text["vocab_size"]
    if isinstance(vision, dict):
        _shrink_vision(vision, text["hidden_size"])
    _tokens_inside(small, text["vocab_size"])
    if text.get("model_type") in ("deepseek_v3", "kimi_k2"):
        for key, value in DEEPSEEK.items():
            text.setdefault(key, value)
    return small


def _shrink_depth(text: dict[str, Any]) -> None:
    layers = text["num_hidden_layers"]
    text["num_hidden_layers"] = few = min(layers, LAYERS)
    for key, value in text.items():
        if isinstance(value, list) and len(value) == layers and layers > few:
            text[key] = value[:few]
    if text.get("first_k_dense_replace"):
        text["first_k_dense_replace"] = min(text["first_k_dense_replace"], DENSE)
    for key in ("num_nextn_predict_layers", "num_mtp_layers"):
        if key in text:
            text[key] = 0


def _shrink_attention(text: dict[str, Any], tp: int) -> None:
    """Fewer heads of the same size: kernels are chosen by the size, and by how many queries share a key."""
    heads = old_heads = text["num_attention_heads"]
    shared = heads // (text.get("num_key_value_heads") or heads)
    head_dim = text.get("head_dim") or text["hidden_size"] // heads
    if text.get("kv_lora_rank"):
        text["num_attention_heads"] = tp * max(1, min(heads // tp, HEADS))
        text["num_key_value_heads"] = text["num_attention_heads"]
        if text.get("q_lora_rank"):
            text["q_lora_rank"] = min(text["q_lora_rank"], HIDDEN)
    else:
        groups = min(heads // shared, max(2, tp))
        shared = shared if (groups * min(shared, 8)) % tp else min(shared, 8)
        text["num_attention_heads"], text["num_key_value_heads"] = groups * shared, groups
    heads, wide = text["num_attention_heads"], text["hidden_size"]
    if text.get("kv_lora_rank") or (text.get("head_dim") and wide != old_heads * head_dim):
        step = math.lcm(heads, 64)
        text["hidden_size"] = min(wide, step * math.ceil(HIDDEN / step))
    else:
        text["hidden_size"] = heads * head_dim


def _shrink_experts(text: dict[str, Any], tp: int) -> None:
    width = max(INNER, 32 * tp)
    for key in ("intermediate_size", "intermediate_size_mlp", "shared_expert_intermediate_size"):
        if text.get(key):
            text[key] = min(text[key], width)
    if text.get("moe_intermediate_size"):
        text["moe_intermediate_size"] = min(text["moe_intermediate_size"], max(INNER // 2, 32 * tp))
    for key in ("n_routed_experts", "num_experts", "num_local_experts"):
        if isinstance(text.get(key), int):
            text[key] = min(text[key], EXPERTS)


def _shrink_vision(vision: dict[str, Any], hidden: int) -> None:
    """A vision tower that costs nothing; no picture is ever shown to it."""
    sizes = {
        "num_hidden_layers": 2, "depth": 2, "num_attention_heads": 4, "num_heads": 4, "hidden_size": 64,
        "embed_dim": 64, "intermediate_size": 128,
    }  # fmt: skip
    old = dict(vision)
    for key, value in sizes.items():
        if f"vt_{key}" in old:
            vision[f"vt_{key}"] = vision[key] = value
        elif key in old:
            vision[key] = value
    if "mm_hidden_size" in old:
        vision["mm_hidden_size"] = vision.get("hidden_size", 64)
    for key in ("text_hidden_size", "out_hidden_size", "projection_dim"):
        if key in old:
            vision[key] = hidden
    for key in ("deepstack_visual_indexes", "fullatt_block_indexes"):
        if key in old:
            vision[key] = [0]


def _tokens_inside(config: dict[str, Any], vocabulary: int) -> None:
    """Special tokens get ids that exist."""
    for key, value in config.items():
        if isinstance(value, dict):
            _tokens_inside(value, vocabulary)
        elif key.endswith(("_token_id", "_token_index")):
            if isinstance(value, int) and value >= vocabulary:
                config[key] = vocabulary - 1
            elif isinstance(value, list):
                config[key] = [min(v, vocabulary - 1) if isinstance(v, int) else v for v in value]


def quantised(config: dict[str, Any]) -> bool:
    """Whether the target's weights are."""
    return any("quantization_config" in part for part in (config, config.get("text_config") or {}))
