"""Layers in SGLang's own words: what a draft's config has to say so that the states it was trained on are taken.

`eagle_config.eagle_aux_hidden_state_layer_ids` is read differently by SGLang's model classes (0.5.17 and 0.5.23,
`set_eagle3_layers_to_capture` in `models/*.py`; wrappers hand the ids on to their language model):

- Most (Llama, Qwen, Gemma, GLM-4, gpt-oss, …): layer outputs, 1 is added. Without ids: the default three.
- LITERAL (DeepSeek V2/V3 and what is built on it, Kimi): hidden_states, but if the first is 1, 1 is added to all.
- SHIFTED: layer outputs; and to the default three, taken without ids, 1 is added too.
"""

from typing import Any

from eyas.engines.layers import default_layers, resolve
from eyas.errors import UserError

LITERAL = frozenset(
    {
        "DeepseekV2ForCausalLM",
        "DeepseekV3ForCausalLM",
        "DeepseekV32ForCausalLM",
        "Glm4MoeLiteForCausalLM",
        "GlmMoeDsaForCausalLM",
        "KimiK25ForConditionalGeneration",
        "MistralLarge3ForCausalLM",
    }
)
SHIFTED = frozenset({"MiniMaxM3SparseForConditionalGeneration"})
IDS = "eagle_aux_hidden_state_layer_ids"


def to_eagle_config(layers: tuple[int, int, int], architecture: str, num_layers: int) -> list[int] | None:
    """The ids with which SGLang takes the hidden_states indices `layers`; None where they are to be left out.

    `architecture` is the first of the target's config.json. Raises UserError for layers that cannot be said.
    """
    shift = 1 if architecture in SHIFTED else 0
    if num_layers > 6 and layers == tuple(layer + shift for layer in default_layers(num_layers)):
        return None
    if layers[0] < 1:
        raise UserError(
            f"capture.layers {list(layers)} (as hidden_states): 0 is the embedding, which SGLang cannot be told to "
            "take; begin with 1 or more"
        )
    if architecture not in LITERAL:
        return [layer - 1 for layer in layers]
    if layers[0] == 1:
        raise UserError(
            f"capture.layers {list(layers)} (as hidden_states): SGLang cannot be told to begin with 1 for "
            f"{architecture}, it would take {[layer + 1 for layer in layers]}; begin with 2 or more"
        )
    return list(layers)


def declared_layers(config: dict[str, Any], architecture: str, num_layers: int) -> tuple[int, int, int]:
    """The hidden_states indices that SGLang takes for a draft's config.json. Raises UserError for ids that none has.

    Ids at the top level alone, vLLM's spelling, count as what they mean there: SGLang itself would not read them.
    """
    ids = (config.get("eagle_config") or {}).get(IDS)
    if ids:
        literal = architecture in LITERAL and ids[0] != 1
        return resolve(ids, "hidden_states" if literal else "layer_output", num_layers)
    if config.get(IDS):
        return resolve(config[IDS], "hidden_states", num_layers)
    low, mid, high = default_layers(num_layers)
    return (low + 1, mid + 1, high + 1) if architecture in SHIFTED else (low, mid, high)
