"""The arithmetic between the matrix products, as functions without state.

Within `compiling` on CUDA those marked `fused` are compiled, for any number of rows; elsewhere they run as they stand.
Compilation takes seconds a function and is kept by PyTorch's own cache, so only training asks for it. The two that
merge attention have kernels of their own (`draft/kernels.py`), of which these are the plain form.

Shapes: n rows, H hidden, A query heads, G key-value heads, E head size, j steps, D draft vocabulary.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])
_compiling = False


@contextmanager
def compiling() -> Iterator[None]:
    """Compile what runs on CUDA in here, backward passes in other threads included."""
    global _compiling
    before, _compiling = _compiling, find_spec("triton") is not None
    try:
        yield
    finally:
        _compiling = before


def fused(rows: dict[int, tuple[int, ...]]) -> Callable[[F], F]:
    """`rows[i]` names the dimensions of argument i that differ from call to call."""

    def decorate(function: F) -> F:
        compiled = functools.cache(lambda: torch.compile(function))

        @functools.wraps(function)
        def call(*args: Any) -> Any:
            if not (_compiling and args[0].is_cuda):
                return function(*args)
            for index, dims in rows.items():
                torch._dynamo.maybe_mark_dynamic(args[index], list(dims))
            return compiled()(*args)

        return call  # type: ignore[return-value]

    return decorate


def wide(x: torch.Tensor) -> torch.Tensor:
    """`x` in float32, or as it is in float64."""
    return x if x.dtype == torch.float64 else x.float()


@fused({0: (0,)})
def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root-mean-square norm of [n, H], computed wide; the dtype stays."""
    return _norm(x, weight, eps)


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    many = wide(x)
    return weight.to(x.dtype) * (many * torch.rsqrt(many.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


@fused({0: (0,), 2: (0,)})
def norm_both(
    first: torch.Tensor, first_weight: torch.Tensor, second: torch.Tensor, second_weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """Two [n, H], each normed with its weight, side by side: [n, 2H] in the dtype of the second."""
    return torch.cat([_norm(first.to(second.dtype), first_weight, eps), _norm(second, second_weight, eps)], dim=-1)


@fused({0: (0,), 1: (0,)})
def add_norm(
    state: torch.Tensor, update: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of two [n, H], and its norm."""
    total = state + update
    return total, _norm(total, weight, eps)


@fused({0: (0,), 1: (0,), 2: (0,)})
def rotate(heads: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of [n, A, E] by `cosine` and `sine` [n, E], first half against second half."""
    first, second = heads.chunk(2, dim=-1)
    turned = torch.cat([-second, first], -1)
    return (heads * cosine.unsqueeze(-2) + turned * sine.unsqueeze(-2)).to(heads.dtype)


@fused({0: (0,), 1: (0,)})
def gated(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """SiLU(gate) * up."""
    return torch.nn.functional.silu(gate) * up


@fused({0: (0,), 1: (1,), 2: (0,), 3: (0, 1), 4: (0, 1)})
def merge(
    out: torch.Tensor,
    log_sum: torch.Tensor,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add each row's own later keys to its attention: `out` [n, A, E] and `log_sum` [A, n] with them in.

    `keys`, `values` [j, n, G, E]. Both parts are exact softmax pieces, merged through their log-sum-exps.
    """
    grouped = wide(query).unflatten(1, (keys.shape[2], -1))
    scores = (grouped * wide(keys).unsqueeze(-2)).sum(-1) * scale  # [j, n, G, A/G]
    before = log_sum.T.reshape(scores.shape[1:])
    total = torch.logaddexp(before, scores.logsumexp(0))
    share = (scores - total).exp().unsqueeze(-1)
    own = (share * wide(values).unsqueeze(-2)).sum(0)
    merged = wide(out).view_as(own) * (before - total).exp().unsqueeze(-1) + own
    return merged.flatten(1, 2).to(out.dtype), total.flatten(1).T.contiguous()


@fused({0: (0,), 1: (0,), 2: (1,), 3: (0,), 4: (0, 1), 5: (0, 1), 7: (0,)})
def merge_backward(
    grad: torch.Tensor,
    out: torch.Tensor,
    log_sum: torch.Tensor,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    to_query: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of `query`, `keys` and `values`, from the merged `out` and `log_sum` and the output's `grad`.

    `to_query` [n, A, E] is what the other keys gave to that of `query`; it is included.
    """
    grouped, to_out = (wide(x).unflatten(1, (keys.shape[2], -1)) for x in (query, grad))
    delta = (to_out * wide(out).view_as(to_out)).sum(-1)
    scores = (grouped * wide(keys).unsqueeze(-2)).sum(-1) * scale
    share = (scores - log_sum.T.reshape(scores.shape[1:])).exp()
    change = share * ((to_out * wide(values).unsqueeze(-2)).sum(-1) - delta) * scale
    more = (change.unsqueeze(-1) * wide(keys).unsqueeze(-2)).sum(0).flatten(1, 2)
    to_keys = (change.unsqueeze(-1) * grouped).sum(-2)
    to_values = (share.unsqueeze(-1) * to_out).sum(-2)
    return (wide(to_query) + more).to(query.dtype), to_keys.to(keys.dtype), to_values.to(values.dtype)


@fused({0: (0,), 1: (0,), 2: (0,), 3: (0,)})
def cross_entropy(
    logits: torch.Tensor, wanted: torch.Tensor, label: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of `logits` [n, D] against the distributions `wanted[label]`: weighted losses [n], and their gradient [n, D]."""
    many, goal = wide(logits), wide(wanted)[label]
    log_sum = many.logsumexp(-1, keepdim=True)
    each = (log_sum.squeeze(-1) - (goal * many).sum(-1)) * weight
    return each, (((many - log_sum).exp() - goal) * weight.unsqueeze(-1)).to(logits.dtype)
