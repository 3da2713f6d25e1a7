"""Step-0 attention by the kernels that come with PyTorch for CUDA, in bfloat16.

`flash`: FlashAttention 2 on runs of any lengths; every card since Ampere, at most 99 KB of shared memory. `cudnn`:
cuDNN's, faster on Hopper, one run after another; used for long runs that are nearly square (few keys that are no rows,
as in a sample that is an answer from its beginning), where a test on this very card has found it right and faster.

Both align a run's last row with its last key. Backward they are given the merged output and log-sum-exp (see
`draft/attention.py`). Shapes: n rows, m keys, A query heads, G key-value heads, E head size; log-sum-exps [A, n].
"""

import functools
import time
from collections.abc import Callable
from typing import Any

import torch

from eyas.draft import plain
from eyas.draft.chains import Chains, chains

Forward = Callable[..., tuple[torch.Tensor, torch.Tensor, tuple[Any, ...]]]
Backward = Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
LONG = 1024
"""Rows of a run from which on it is worth a launch of its own."""


def pick(what: Chains, query: torch.Tensor, key: torch.Tensor) -> tuple[Forward, Backward]:
    """The kernel for these runs, forward and backward."""
    heads, size = query.shape[1:]
    narrow = query.dtype in (torch.bfloat16, torch.float16)
    if not (query.is_cuda and narrow and size % 8 == 0 and size <= 256):
        return plain.forward, plain.backward
    square = all(b - a >= LONG and d - c <= 1.1 * (b - a) for a, b, c, d in what.spans)
    if square and size <= 128 and cudnn_is_better(heads, key.shape[1], size, query.device):
        return cudnn, cudnn_backward
    return flash, flash_backward


def _longest(what: Chains) -> tuple[int, int]:
    # At one query a run the kernel would turn to its decoding form, which lays things out otherwise.
    return max(2, *(b - a for a, b, _, _ in what.spans)), max(d - c for _, _, c, d in what.spans)


def flash(
    what: Chains, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, tuple[Any, ...]]:
    """Attention, log-sum-exp, and what the way back needs besides."""
    starts = what.run_starts, what.key_starts
    out, log_sum, seed, offset, _ = torch.ops.aten._flash_attention_forward(
        query, key, value, *starts, *_longest(what), 0.0, True, False
    )
    return out, log_sum, (seed, offset)


def flash_backward(
    what: Chains,
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    log_sum: torch.Tensor,
    seed: torch.Tensor,
    offset: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of `query`, `key` and `value`."""
    starts = what.run_starts, what.key_starts
    gradients: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = torch.ops.aten._flash_attention_backward(
        grad, query, key, value, out, log_sum, *starts, *_longest(what), 0.0, True, seed, offset
    )
    return gradients


def _heads_first(x: torch.Tensor, pad: int = 0) -> torch.Tensor:
    """[t, heads, E] as [1, heads, pad + t, E], `pad` rows of zeros in front."""
    if pad:
        x = torch.nn.functional.pad(x, (0, 0, 0, 0, pad, 0))
    return x.transpose(0, 1).unsqueeze(0)


def cudnn(
    what: Chains, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, tuple[Any, ...]]:
    """As `flash`; keys in front of a run's first row get rows of zeros."""
    outs, log_sums, states = [], [], []
    for first, stop, begin, end in what.spans:
        pad = (end - begin) - (stop - first)
        parts = _heads_first(query[first:stop], pad), _heads_first(key[begin:end]), _heads_first(value[begin:end])
        out, log_sum, _, _, longest, longest_key, seed, offset, _ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            *parts, None, True, 0.0, True, False
        )
        outs.append(out[0].transpose(0, 1)[pad:])
        log_sums.append(log_sum.view(log_sum.shape[1], -1)[:, pad:])
        states.append((longest, longest_key, seed, offset, log_sum.shape))
    return torch.cat(outs).contiguous(), torch.cat(log_sums, 1).contiguous(), tuple(states)


def cudnn_backward(
    what: Chains,
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    log_sum: torch.Tensor,
    *states: tuple[Any, ...],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of `query`, `key` and `value`."""
    found = []
    for (first, stop, begin, end), state in zip(what.spans, states, strict=True):
        longest, longest_key, seed, offset, shape = state
        pad = (end - begin) - (stop - first)
        given = [_heads_first(x[first:stop], pad) for x in (grad, query, out)]
        keys = _heads_first(key[begin:end]), _heads_first(value[begin:end])
        sums = torch.nn.functional.pad(log_sum[:, first:stop], (pad, 0)).contiguous().view(shape)
        gradients = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            given[0], given[1], *keys, given[2], sums, seed, offset, None, None, None, longest, longest_key, 0.0, True
        )
        to_query, to_key, to_value = (x[0].transpose(0, 1) for x in gradients)
        found.append((to_query[pad:], to_key, to_value))
    to_query, to_key, to_value = (torch.cat(x).contiguous() for x in zip(*found, strict=True))
    return to_query, to_key, to_value


@functools.cache
def cudnn_is_better(heads: int, groups: int, size: int, device: torch.device) -> bool:
    """Is cuDNN right, with a log-sum-exp that is not its own, and faster than FlashAttention? Takes some seconds."""
    try:
        errors, seconds = compare(heads, groups, size, device)
    except RuntimeError:  # no cuDNN, or none for this card or shape
        return False
    return errors["cudnn"] < 1.5 * errors["flash"] and seconds["cudnn"] < 0.95 * seconds["flash"]


def compare(heads: int, groups: int, size: int, device: torch.device) -> tuple[dict[str, float], dict[str, float]]:
    """Relative error against the plain computation, and seconds forward and backward, of both kernels."""
    long = 4 * LONG
    generator = torch.Generator(device).manual_seed(0)

    def numbers(rows: int, of: int) -> torch.Tensor:
        return torch.randn(rows, of, size, generator=generator, device=device)

    def whole(length: int) -> Chains:
        ids = torch.zeros(length, dtype=torch.int64)
        answer = torch.arange(length) >= 3  # a few keys more than rows
        return chains(ids, answer, torch.tensor([0, length]), 1).to(device)

    def both(kernel: tuple[Forward, Backward], what: Chains, dtype: torch.dtype) -> list[torch.Tensor]:
        generator.manual_seed(1)
        rows, keys = len(what), int(what.spans[0][3])
        query, grad, out = (numbers(rows, heads).bfloat16().to(dtype) for _ in range(3))
        key, value = (numbers(keys, groups).bfloat16().to(dtype) for _ in range(2))
        own, log_sum, state = kernel[0](what, query, key, value)
        merged = log_sum + 0.5  # as if there were later keys
        return [own, log_sum, *kernel[1](what, grad, query, key, value, out, merged, *state)]

    exact = both((plain.forward, plain.backward), whole(LONG), torch.float32)
    kernels: dict[str, tuple[Forward, Backward]] = {
        "flash": (flash, flash_backward),
        "cudnn": (cudnn, cudnn_backward),
    }
    errors: dict[str, float] = {}
    seconds: dict[str, float] = {}
    for name, kernel in kernels.items():
        found = both(kernel, whole(LONG), torch.bfloat16)
        errors[name] = max(float((a - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True))
        what = whole(long)
        for _ in range(6):
            torch.cuda.synchronize(device)
            began = time.perf_counter()
            both(kernel, what, torch.bfloat16)
            torch.cuda.synchronize(device)
            took = time.perf_counter() - began
            seconds[name] = min(seconds.get(name, took), took)
    return errors, seconds
