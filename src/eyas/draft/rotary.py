"""The draft's rotary frequencies, which are the target's.

The usual form is one line; scaled ones (llama3, yarn, …) are left to transformers, which takes seconds to import.
"""

from typing import Any

import torch

from eyas.errors import UserError


def frequencies(rope_parameters: dict[str, Any], head_dim: int, max_positions: int) -> tuple[torch.Tensor, float]:
    """Inverse frequencies, float32 [head_dim / 2], and the factor on cosine and sine.

    Raises UserError for a kind of scaling that transformers does not know.
    """
    kind = rope_parameters["rope_type"]
    if kind == "default":
        steps = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        return 1.0 / (rope_parameters["rope_theta"] ** steps), 1.0
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    if kind not in ROPE_INIT_FUNCTIONS:
        raise UserError(
            f"rope_type {kind!r} is not supported; known: default, {', '.join(sorted(ROPE_INIT_FUNCTIONS))}"
        )
    config = LlamaConfig(
        hidden_size=head_dim,
        num_attention_heads=1,
        head_dim=head_dim,
        max_position_embeddings=max_positions,
        rope_parameters=rope_parameters,
    )
    inverse, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    return inverse, float(factor)
