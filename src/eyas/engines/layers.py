"""Layer ids: three conventions are in use, and the same numbers under another one may be other tensors.

For a target of n layers (61 in the last column):

| convention | meaning | default | n = 61 |
|---|---|---|---|
| `layer_output` | the layer whose *output* is taken (0: the first) | 1, n//2-1, n-4 | 1, 29, 57 |
| `hidden_states` | layer whose *input* is taken = place among all hidden states | 2, n//2, n-3 | 2, 30, 58 |
| `sglang` | `layers_to_capture` of a running SGLang, after it added 1 to given layer outputs | the same | 2, 30, 58 |

So a patched SGLang that was given 2, 30, 58 and prints 3, 31, 59 takes hidden_states 3, 31, 59, not the default. What
an unpatched one has to be told is another matter, see `engines/sglang/layers.py`.

The first of all hidden states, number 0, is the embedding. Everything inside eyas is a hidden_states index; whatever a
user or an engine says is converted here, at the door. One layer off trains well and is rejected when served. What is
captured is the full residual stream (hidden + residual).
"""

from collections.abc import Sequence
from typing import Literal

from eyas.errors import UserError

Convention = Literal["hidden_states", "layer_output", "sglang"]


def default_layers(n: int) -> tuple[int, int, int]:
    """The three hidden_states indices that every engine takes for a target of `n` layers unless told otherwise.

    Raises UserError for a target so small that they collide.
    """
    layers = (2, n // 2, n - 3)
    if not layers[0] < layers[1] < layers[2]:
        raise UserError(
            f"the target has only {n} layers, too few for the default layers {layers}: "
            "name three different ones in capture.layers"
        )
    return layers


def resolve(layers: Literal["default"] | Sequence[int], convention: Convention, n: int) -> tuple[int, int, int]:
    """The three hidden_states indices that `layers` means under `convention`, for a target of `n` layers.

    Raises UserError [vllm 46788, Model-Optimizer 300]: not three ids, a negative, repeated or too large one, or not in
    ascending order. hidden_states[n] is refused too: most engines give it after the final norm, and it is captured as
    the last state anyway.
    """
    if isinstance(layers, str):
        return default_layers(n)
    given = f"capture.layers {list(layers)} ({convention})"
    shift = 1 if convention == "layer_output" else 0
    largest = n - 1 - shift
    if len(layers) != 3:
        raise UserError(f"{given}: EAGLE-3 takes three layers, these are {len(layers)}")
    for layer in layers:
        if layer < 0:
            raise UserError(f"{given}: {layer} is negative; ids count from 0")
        if layer == largest + 1:
            raise UserError(
                f"{given}: {layer} is the last state, which the final norm changes and which is captured anyway; "
                f"the largest id for {n} layers is {largest}"
            )
        if layer > largest:
            raise UserError(f"{given}: {layer} does not exist; the largest id for {n} layers is {largest}")
    if len(set(layers)) != 3:
        raise UserError(f"{given}: the three ids must differ")
    low, mid, high = layers
    if not low < mid < high:
        raise UserError(f"{given}: name them in ascending order, {sorted(layers)}")
    return low + shift, mid + shift, high + shift
