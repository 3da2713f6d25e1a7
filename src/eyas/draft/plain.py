"""Step-0 attention written out: on any device, in float32 or wider, a block of rows at a time.

Shapes: n rows, m keys, A query heads, G key-value heads, E head size.
"""

import torch

from eyas.draft.chains import Chains
from eyas.draft.fused import wide

BLOCK = 512
"""Rows that are looked at together."""


def forward(
    chains: Chains, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, ...]]:
    """Attention [n, A, E] and log-sum-exp [A, n]; nothing else is kept for the way back."""
    outs, log_sums = [], []
    for rows, cols in _blocks(chains):
        scores = _scores(query[rows], key[cols])
        log_sum = scores.logsumexp(-1)
        share = (scores - log_sum[..., None]).exp_()
        out = share.flatten(1, 2) @ wide(value[cols]).transpose(0, 1)  # [G, A/G * q, E]
        outs.append(out.unflatten(1, share.shape[1:3]).permute(2, 0, 1, 3).flatten(1, 2))
        log_sums.append(log_sum.flatten(0, 1))
    return torch.cat(outs).to(query.dtype), torch.cat(log_sums, 1), ()


def backward(
    chains: Chains,
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    log_sum: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of `query`, `key` and `value` from the merged `out` and `log_sum`."""
    groups, size = key.shape[1:]
    to_query, to_key, to_value = (torch.zeros_like(wide(x)) for x in (query, key, value))
    delta = (wide(grad) * wide(out)).sum(-1)  # [n, A]

    def grouped(x: torch.Tensor) -> torch.Tensor:
        return wide(x).view(len(x), groups, -1, size).permute(1, 2, 0, 3).flatten(1, 2)  # [G, A/G * q, E]

    for rows, cols in _blocks(chains):
        scores = _scores(query[rows], key[cols])
        share = (scores - log_sum[:, rows].unflatten(0, (groups, -1))[..., None]).exp_().flatten(1, 2)
        gradient = grouped(grad[rows])
        to_value[cols] += (share.transpose(1, 2) @ gradient).transpose(0, 1)
        change = gradient @ wide(value[cols]).permute(1, 2, 0)
        change.sub_(delta[rows].view(-1, groups, delta.shape[1] // groups).permute(1, 2, 0).flatten(1)[..., None])
        change.mul_(share).mul_(size**-0.5)
        to_key[cols] += (change.transpose(1, 2) @ grouped(query[rows])).transpose(0, 1)
        moved = (change @ wide(key[cols]).transpose(0, 1)).unflatten(1, (-1, rows.stop - rows.start))
        to_query[rows] = moved.permute(2, 0, 1, 3).flatten(1, 2)
    return to_query.to(query.dtype), to_key.to(key.dtype), to_value.to(value.dtype)


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
    shaped = wide(query).view(len(query), groups, -1, size).permute(1, 2, 0, 3) * size**-0.5
    scores = (shaped.flatten(1, 2) @ wide(key).permute(1, 2, 0)).unflatten(1, (-1, len(query)))
    hidden = torch.ones(len(query), len(key), dtype=torch.bool, device=key.device).triu(len(key) - len(query) + 1)
    return scores.masked_fill_(hidden, float("-inf"))
