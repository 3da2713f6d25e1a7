"""What a draft's config says about layers, and what SGLang's classes make of it."""

from collections.abc import Callable

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from eyas.engines.layers import default_layers
from eyas.engines.sglang.layers import to_eagle_config
from eyas.errors import UserError

Layers = tuple[int, int, int]


def like_llama(ids: list[int] | None, n: int) -> list[int]:
    """As `models/llama.py` of SGLang 0.5.23."""
    return [2, n // 2, n - 3] if ids is None else [i + 1 for i in ids]


def like_deepseek(ids: list[int] | None, n: int) -> list[int]:
    """As `models/deepseek_v2.py`."""
    if ids is None:
        return [2, n // 2, n - 3]
    return [i + 1 for i in ids] if ids and ids[0] == 1 else list(ids)


def like_gpt_oss(ids: list[int] | None, n: int) -> list[int]:
    """As `models/gpt_oss.py`."""
    if ids is None:
        return [2, n // 2, n - 3]
    return list(ids) if ids and max(ids) == n else [i + 1 for i in ids]


def like_minimax_m3_vl(ids: list[int] | None, n: int) -> list[int]:
    """As `models/minimax_m3_vl.py`."""
    return [i + 1 for i in ([2, n // 2, n - 3] if ids is None else ids)]


SGLANG = {
    "LlamaForCausalLM": like_llama,
    "Qwen3MoeForCausalLM": like_llama,
    "Llama4ForConditionalGeneration": like_llama,
    "GptOssForCausalLM": like_gpt_oss,
    "DeepseekV3ForCausalLM": like_deepseek,
    "KimiK25ForConditionalGeneration": like_deepseek,
    "GlmMoeDsaForCausalLM": like_deepseek,
    "MiniMaxM3SparseForConditionalGeneration": like_minimax_m3_vl,
}


@pytest.mark.parametrize(("architecture", "takes"), SGLANG.items())
@given(st.integers(7, 90), st.data())
def test_sglang_takes_the_layers_that_were_meant(
    architecture: str, takes: Callable[[list[int] | None, int], list[int]], n: int, data: st.DataObject
) -> None:
    ids = sorted(data.draw(st.sets(st.integers(1, n - 1), min_size=3, max_size=3)))
    layers = (ids[0], ids[1], ids[2])
    assume(takes is not like_deepseek or layers[0] > 1)
    assert takes(to_eagle_config(layers, architecture, n), n) == ids


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "DeepseekV3ForCausalLM"])
def test_the_default_is_left_out(architecture: str) -> None:
    assert to_eagle_config(default_layers(61), architecture, 61) is None
    assert to_eagle_config((3, 31, 59), architecture, 61) == ([2, 30, 58] if "Llama" in architecture else [3, 31, 59])


def test_a_class_whose_default_is_another_is_told() -> None:
    assert to_eagle_config((2, 30, 58), "MiniMaxM3SparseForConditionalGeneration", 61) == [1, 29, 57]
    assert to_eagle_config((3, 31, 59), "MiniMaxM3SparseForConditionalGeneration", 61) is None


def test_small_targets() -> None:
    assert to_eagle_config((1, 2, 3), "LlamaForCausalLM", 4) == [0, 1, 2]


@pytest.mark.parametrize(
    ("layers", "architecture", "message"),
    [
        ((1, 30, 58), "KimiK25ForConditionalGeneration", r"begin with 1 for Kimi.*take \[2, 31, 59\]; begin with 2"),
        ((0, 30, 58), "DeepseekV3ForCausalLM", "0 is the embedding"),
        ((0, 30, 58), "LlamaForCausalLM", "0 is the embedding"),
    ],
)
def test_what_cannot_be_said(layers: Layers, architecture: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        to_eagle_config(layers, architecture, 61)
