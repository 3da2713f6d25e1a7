"""Attention of one unroll step: causal over the step-0 keys of the document, merged with the row's own later keys.

The query of row r at step k sees the step-0 keys up to its own slot, and its own keys of steps 1..k. The first part is
ordinary attention of variable-length runs, for which FlashAttention 2 (in PyTorch, any CUDA card since Ampere, no more
than 99 KB of shared memory) or a plain computation is used; the second part is k products a row. Both give a
log-sum-exp, through which they are merged.

Backward: with P = exp(S - L), L the *merged* log-sum-exp, dS = P * (dP - rowsum(dO * O)) holds for the keys of both
parts, so FlashAttention's backward kernel, given the merged output and log-sum-exp, returns exactly the first part's
share. Its own would lose the gradient that comes through the log-sum-exp [flash-attention 1817].

Shapes: n rows, m keys, A query heads, G key-value heads, E head size.
"""

from typing import Any

import torch

from eyas.draft import fused
from eyas.draft.chains import Chains

BLOCK = 512
"""Rows that the plain computation looks at together."""


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
        key, value, own = kv[0], kv[1], kv[2:]
        ctx.chains, ctx.flash = chains, _flash_takes(query)
        out, log_sum, ctx.random = (_flash if ctx.flash else _plain)(chains, query, key, value)
        if own:
            stacked = torch.stack(own[::2]), torch.stack(own[1::2])
            out, log_sum = fused.merge(out, log_sum, query, *stacked, query.shape[-1] ** -0.5)
        ctx.save_for_backward(query, key, value, out, log_sum, *own)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, out, log_sum, *own = ctx.saved_tensors
        grad = grad.contiguous()
        arguments = (ctx.chains, grad, query, key, value, out, log_sum)
        first = _flash_backward(*arguments, *ctx.random) if ctx.flash else _plain_backward(*arguments)
        to_query, to_key, to_value = first
        later: list[torch.Tensor] = []
        if own:
            stacked = torch.stack(own[::2]), torch.stack(own[1::2])
            more, keys, values = fused.merge_backward(grad, out, log_sum, query, *stacked, query.shape[-1] ** -0.5)
            to_query = to_query + more
            later = [tensor for pair in zip(keys, values, strict=True) for tensor in pair]
        return None, to_query, to_key, to_value, *later


def _flash_takes(query: torch.Tensor) -> bool:
    narrow = query.dtype in (torch.bfloat16, torch.float16)
    return query.is_cuda and narrow and query.shape[-1] % 8 == 0 and query.shape[-1] <= 256


def _longest(chains: Chains) -> tuple[int, int]:
    # At one query a run the kernel would turn to its decoding form, which lays things out otherwise.
    return max(2, *(b - a for a, b, _, _ in chains.spans)), max(d - c for _, _, c, d in chains.spans)


def _flash(
    chains: Chains, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, ...]]:
    starts = chains.run_starts, chains.key_starts
    out, log_sum, seed, offset, _ = torch.ops.aten._flash_attention_forward(
        query, key, value, *starts, *_longest(chains), 0.0, True, False
    )
    return out, log_sum, (seed, offset)


def _flash_backward(
    chains: Chains,
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    log_sum: torch.Tensor,
    seed: torch.Tensor,
    offset: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    starts = chains.run_starts, chains.key_starts
    gradients: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = torch.ops.aten._flash_attention_backward(
        grad, query, key, value, out, log_sum, *starts, *_longest(chains), 0.0, True, seed, offset
    )
    return gradients


def _blocks(chains: Chains) -> list[tuple[slice, slice]]:
    """Rows and the keys that the last of them sees, at most BLOCK rows each."""
    found = []
    for first, stop, begin, end in chains.spans:
        for top in range(first, stop, BLOCK):
            bottom = min(top + BLOCK, stop)
            found.append((slice(top, bottom), slice(begin, end - (stop - bottom))))
    return found


def _scores(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Masked scores [G, A/G, q, k] of a block: the last query sees all keys, the one before one less."""
    groups, size = key.shape[1:]
    shaped = fused.wide(query).view(len(query), groups, -1, size).permute(1, 2, 0, 3) * size**-0.5
    scores = (shaped.flatten(1, 2) @ fused.wide(key).permute(1, 2, 0)).unflatten(1, (-1, len(query)))
    hidden = torch.ones(len(query), len(key), dtype=torch.bool, device=key.device).triu(len(key) - len(query) + 1)
    return scores.masked_fill_(hidden, float("-inf"))


def _plain(
    chains: Chains, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, ...]]:
    outs, log_sums = [], []
    for rows, cols in _blocks(chains):
        scores = _scores(query[rows], key[cols])
        log_sum = scores.logsumexp(-1)
        share = (scores - log_sum[..., None]).exp_()
        out = share.flatten(1, 2) @ fused.wide(value[cols]).transpose(0, 1)  # [G, A/G * q, E]
        outs.append(out.unflatten(1, share.shape[1:3]).permute(2, 0, 1, 3).flatten(1, 2))
        log_sums.append(log_sum.flatten(0, 1))
    return torch.cat(outs).to(query.dtype), torch.cat(log_sums, 1), ()


def _plain_backward(
    chains: Chains,
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    log_sum: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    groups, size = key.shape[1:]
    to_query, to_key, to_value = (torch.zeros_like(fused.wide(x)) for x in (query, key, value))
    delta = (fused.wide(grad) * fused.wide(out)).sum(-1)  # [n, A]

    def grouped(x: torch.Tensor) -> torch.Tensor:
        return fused.wide(x).view(len(x), groups, -1, size).permute(1, 2, 0, 3).flatten(1, 2)  # [G, A/G * q, E]

    for rows, cols in _blocks(chains):
        scores = _scores(query[rows], key[cols])
        share = (scores - log_sum[:, rows].unflatten(0, (groups, -1))[..., None]).exp_().flatten(1, 2)
        gradient = grouped(grad[rows])
        to_value[cols] += (share.transpose(1, 2) @ gradient).transpose(0, 1)
        change = gradient @ fused.wide(value[cols]).permute(1, 2, 0)
        change.sub_(delta[rows].view(-1, groups, delta.shape[1] // groups).permute(1, 2, 0).flatten(1)[..., None])
        change.mul_(share).mul_(size**-0.5)
        to_key[cols] += (change.transpose(1, 2) @ grouped(query[rows])).transpose(0, 1)
        moved = (change @ fused.wide(key[cols]).transpose(0, 1)).unflatten(1, (-1, rows.stop - rows.start))
        to_query[rows] = moved.permute(2, 0, 1, 3).flatten(1, 2)
    return to_query.to(query.dtype), to_key.to(key.dtype), to_value.to(value.dtype)
