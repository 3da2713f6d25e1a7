"""fp8 for states: e4m3 codes, with a scale for each token and layer.

The scale is the smallest power of two under which the token's largest value is at most 448, the largest number of e4m3.
A power of two costs a floating format no precision and makes the scaling exact, so that a state is rounded once: to
three mantissa bits, a relative error of at most 1/16 down to 2^-14 of the token's largest value.
"""

import torch

FP8 = torch.float8_e4m3fn
BLOCK = 1 << 19
"""Elements encoded at once: what lies between stays in the processor's cache."""


def encode(states: torch.Tensor, layers: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes float8_e4m3fn [n, L*H] and scales float32 [n, L] of `states` [n, L*H]: L layers side by side.

    States in float32 are rounded to bfloat16 first. They must be finite, which the proofs see to.
    """
    rows, width = states.shape
    codes, scale = states.new_empty((rows, width), dtype=FP8), states.new_empty((rows, layers), dtype=torch.float32)
    step = max(1, BLOCK // max(1, width)) if states.device.type == "cpu" else max(1, rows)
    for first in range(0, rows, step):
        part = slice(first, first + step)
        wide = states[part].to(torch.bfloat16).unflatten(1, (layers, -1))
        scale[part] = _scale(wide)
        factor = (1 / scale[part]).to(torch.bfloat16)[..., None]
        codes[part].unflatten(1, (layers, -1)).copy_(wide * factor)
    return codes, scale


def decode(codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """States [n, L*H] in `dtype`, on the device of `codes` float8_e4m3fn [n, L*H]; `scale` float32 [n, L]."""
    wide = codes.to(dtype).unflatten(1, (scale.shape[1], -1))
    return wide.mul_(scale.to(dtype)[..., None]).flatten(1)


def _scale(wide: torch.Tensor) -> torch.Tensor:
    """Smallest powers of two [n, L] under which |wide| [n, L, H] stays within 448 = 1.75 * 2^8."""
    bits = (wide.view(torch.int16) & 0x7FFF).amax(-1).int()  # magnitudes are ordered as their bits are
    exponent = (bits >> 7) - 127 - 8 + ((bits & 0x7F) > 0x60).int()
    return torch.exp2(exponent.clamp(-118, 118).float())
