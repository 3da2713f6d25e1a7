"""The draft turns as its target does."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from eyas.draft.rotary import frequencies
from eyas.errors import UserError


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 100000.0},
        {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
        {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64},
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_frequencies_equal_the_target_s(rope):
    config = LlamaConfig(
        hidden_size=64, num_attention_heads=4, head_dim=16, max_position_embeddings=256, rope_parameters=dict(rope)
    )
    theirs = LlamaRotaryEmbedding(config)
    inverse, factor = frequencies(rope, 16, 256)
    torch.testing.assert_close(inverse, theirs.inv_freq, rtol=1e-6, atol=0)
    assert factor == pytest.approx(theirs.attention_scaling)


def test_an_unknown_kind_is_refused():
    with pytest.raises(UserError, match=r"rope_type 'spiral' is not supported; known: default, "):
        frequencies({"rope_type": "spiral", "rope_theta": 1.0}, 16, 256)
