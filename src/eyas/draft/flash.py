"""Step-0 attention by FlashAttention 2, which comes with PyTorch: any card since Ampere, at most 99 KB shared memory.

In bfloat16, over runs of any lengths; a run's last row is aligned with its last key. Backward it is given the merged
output and log-sum-exp (see `draft/attention.py`).

Shapes: n rows, m keys, A query heads, G key-value heads, E head size.
"""

from typing import Any

import torch

from eyas.draft.chains import Chains


def takes(query: torch.Tensor) -> bool:
    """Is there a kernel for these queries [n, A, E]?"""
    narrow = query.dtype in (torch.bfloat16, torch.float16)
    return query.is_cuda and narrow and query.shape[-1] % 8 == 0 and query.shape[-1] <= 256


def _longest(what: Chains) -> tuple[int, int]:
    # At one query a run the kernel would turn to its decoding form, which lays things out otherwise.
    return max(2, *(b - a for a, b, _, _ in what.spans)), max(d - c for _, _, c, d in what.spans)


def forward(
    what: Chains, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, tuple[Any, ...]]:
    """Attention [n, A, E], log-sum-exp [A, n], and what the way back needs besides."""
    starts = what.run_starts, what.key_starts
    out, log_sum, seed, offset, _ = torch.ops.aten._flash_attention_forward(
        query, key, value, *starts, *_longest(what), 0.0, True, False
    )
    return out, log_sum, (seed, offset)


def backward(
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
