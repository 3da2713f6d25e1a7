"""Layer ids: the three conventions, and what is refused."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.engines.layers import default_layers, resolve
from eyas.errors import UserError


def test_the_recipes_table() -> None:
    assert default_layers(61) == (2, 30, 58)
    assert resolve("default", "hidden_states", 61) == (2, 30, 58)
    assert resolve([1, 29, 57], "layer_output", 61) == (2, 30, 58)
    assert resolve([2, 30, 58], "hidden_states", 61) == (2, 30, 58)
    # what 'layers [3, 31, 59]' in a patched SGLang means, which was given 2, 30, 58: other tensors
    assert resolve([3, 31, 59], "sglang", 61) == resolve([2, 30, 58], "layer_output", 61) == (3, 31, 59)
    assert resolve([2, 30, 58], "sglang", 61) == resolve("default", "sglang", 61) == (2, 30, 58)


@given(st.integers(7, 200))
def test_both_conventions_agree_on_the_defaults(n: int) -> None:
    assert (
        default_layers(n) == resolve([1, n // 2 - 1, n - 4], "layer_output", n) == resolve("default", "layer_output", n)
    )


@pytest.mark.parametrize("n", range(1, 7))
def test_targets_too_small_for_the_defaults(n: int) -> None:
    with pytest.raises(UserError, match=rf"only {n} layers.*name three different ones in capture\.layers"):
        resolve("default", "hidden_states", n)


def test_small_targets_with_named_layers() -> None:
    assert resolve([0, 1, 2], "hidden_states", 3) == (0, 1, 2)
    assert resolve([0, 1, 2], "layer_output", 4) == (1, 2, 3)


@pytest.mark.parametrize(
    ("layers", "convention", "message"),
    [
        ([2, 30], "hidden_states", "takes three layers, these are 2"),
        ([2, 30, 58, 59], "hidden_states", "these are 4"),
        ([-1, 30, 58], "hidden_states", "-1 is negative"),
        ([-1, 30, 58], "layer_output", "-1 is negative"),
        ([2, 30, 61], "hidden_states", "61 is the last state.*largest id for 61 layers is 60"),
        ([3, 31, 61], "sglang", "61 is the last state.*largest id for 61 layers is 60"),
        ([2, 30, 60], "layer_output", "60 is the last state.*largest id for 61 layers is 59"),
        ([2, 30, 62], "hidden_states", "62 does not exist"),
        ([2, 30, 61], "layer_output", "61 does not exist"),
        ([2, 2, 58], "hidden_states", "must differ"),
        ([2, 58, 2], "hidden_states", "must differ"),
        ([58, 30, 2], "hidden_states", r"ascending order, \[2, 30, 58\]"),
    ],
)
def test_refused(layers: list[int], convention: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        resolve(layers, convention, 61)


@given(
    st.lists(st.integers(-3, 15), min_size=2, max_size=4),
    st.sampled_from(["hidden_states", "layer_output", "sglang"]),
    st.integers(1, 14),
)
def test_what_is_accepted_exists(layers: list[int], convention: Any, n: int) -> None:
    try:
        low, mid, high = resolve(layers, convention, n)
    except UserError:
        return
    assert 0 <= low < mid < high < n
    assert [low, mid, high] == [layer + (convention == "layer_output") for layer in layers]
