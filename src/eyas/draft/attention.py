"""Attention of one unroll step: causal over the step-0 keys of the document, merged with the row's own later keys.

The query of row r at step k sees the step-0 keys up to its own slot, and its own keys of steps 1..k. The first part is
ordinary attention over runs of variable length (`draft/flash.py`, `draft/plain.py`), the second k products a row. Both
give a log-sum-exp, through which they are merged: exactly one softmax over all.

Backward: with P = exp(S - L), L the *merged* log-sum-exp, dS = P * (dP - rowsum(dO * O)) holds for the keys of both
parts, so a flash attention's backward kernel, given the merged output and log-sum-exp, returns exactly the first part's
share. Its own would lose the gradient that comes through the log-sum-exp [flash-attention 1817].

Shapes: n rows, m keys, A query heads, G key-value heads, E head size.
"""

from importlib.util import find_spec
from typing import Any

import torch

from eyas.draft import flash, fused
from eyas.draft.chains import Chains


def attend(
    chains: Chains,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    own: list[tuple[torch.Tensor, torch.Tensor]],
) -> torch.Tensor:
    """Attention [n, A, E] of `query` over `key`, `value` [m, G, E] and the rows' `own` later pairs, each [n, G, E]."""
    return _Attend.apply(chains, query, key, value, *(tensor for pair in own for tensor in pair))


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, chains: Chains, query: torch.Tensor, *kv: torch.Tensor) -> torch.Tensor:
        query, key, value, own = query.contiguous(), kv[0], kv[1], kv[2:]
        forward, ctx.way_back = flash.pick(chains, query, key)
        out, log_sum, ctx.state = forward(chains, query, key, value)
        ctx.chains, ctx.scale = chains, query.shape[-1] ** -0.5
        if own:
            stacked = torch.stack(own[::2]), torch.stack(own[1::2])
            out, log_sum = _merge(query)(out, log_sum, query, *stacked, ctx.scale)
        ctx.save_for_backward(query, key, value, out, log_sum, *own)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, out, log_sum, *own = ctx.saved_tensors
        grad = grad.contiguous()
        first = ctx.way_back(ctx.chains, grad, query, key, value, out, log_sum, *ctx.state)
        to_query, to_key, to_value = first
        later: list[torch.Tensor] = []
        if own:
            stacked = torch.stack(own[::2]), torch.stack(own[1::2])
            backward = _merge(query, backward=True)
            to_query, keys, values = backward(grad, out, log_sum, query, *stacked, ctx.scale, to_query)
            later = [tensor for pair in zip(keys, values, strict=True) for tensor in pair]
        return None, to_query, to_key, to_value, *later


def _merge(query: torch.Tensor, backward: bool = False) -> Any:
    """The kernel where there is one for this card, else the plain form."""
    if query.is_cuda and query.dtype != torch.float64 and find_spec("triton"):
        from eyas.draft import kernels

        if kernels.usable(query.device):
            return kernels.merge_backward if backward else kernels.merge
    return fused.merge_backward if backward else fused.merge
