"""`fused.merge` and its backward as one Triton kernel each: a program holds one row of one key-value group.

What a compiler makes of them reads the same rows many times. Any row count; one compilation a number of later steps.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from eyas.draft import fused


@triton.jit(do_not_specialize=["n"])
def _merge(  # type: ignore[no-untyped-def]
    out, log_sum, query, keys, values, merged, total, scale, n, STEPS: tl.constexpr,
    GROUPS: tl.constexpr, SHARED: tl.constexpr, SIZE: tl.constexpr, WIDE: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    head, place = tl.arange(0, WIDE), tl.arange(0, ACROSS)
    inside = (head < SHARED)[:, None] & (place < SIZE)[None, :]
    here = (row * GROUPS * SHARED + group * SHARED + head)[:, None] * SIZE + place[None, :]
    q = tl.load(query + here, inside, 0.0).to(tl.float32)
    o = tl.load(out + here, inside, 0.0).to(tl.float32)
    sums = (group * SHARED + head) * n + row
    known = tl.load(log_sum + sums, head < SHARED, 0.0)
    for step in range(STEPS):
        there = ((step * n + row) * GROUPS + group) * SIZE + place
        k = tl.load(keys + there, place < SIZE, 0.0).to(tl.float32)
        v = tl.load(values + there, place < SIZE, 0.0).to(tl.float32)
        score = tl.sum(q * k[None, :], 1) * scale
        most = tl.maximum(known, score)
        both = most + tl.log(tl.exp(known - most) + tl.exp(score - most))
        o = o * tl.exp(known - both)[:, None] + tl.exp(score - both)[:, None] * v[None, :]
        known = both
    tl.store(merged + here, o.to(merged.dtype.element_ty), inside)
    tl.store(total + sums, known, head < SHARED)


@triton.jit(do_not_specialize=["n"])
def _merge_backward(  # type: ignore[no-untyped-def]
    grad, out, log_sum, query, keys, values, to_query, to_keys, to_values, scale, n, STEPS: tl.constexpr,
    GROUPS: tl.constexpr, SHARED: tl.constexpr, SIZE: tl.constexpr, WIDE: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    head, place = tl.arange(0, WIDE), tl.arange(0, ACROSS)
    inside = (head < SHARED)[:, None] & (place < SIZE)[None, :]
    here = (row * GROUPS * SHARED + group * SHARED + head)[:, None] * SIZE + place[None, :]
    q = tl.load(query + here, inside, 0.0).to(tl.float32)
    g = tl.load(grad + here, inside, 0.0).to(tl.float32)
    o = tl.load(out + here, inside, 0.0).to(tl.float32)
    known = tl.load(log_sum + (group * SHARED + head) * n + row, head < SHARED, float("inf"))
    delta = tl.sum(g * o, 1)
    change_q = tl.load(to_query + here, inside, 0.0).to(tl.float32)
    for step in range(STEPS):
        there = ((step * n + row) * GROUPS + group) * SIZE + place
        k = tl.load(keys + there, place < SIZE, 0.0).to(tl.float32)
        v = tl.load(values + there, place < SIZE, 0.0).to(tl.float32)
        share = tl.exp(tl.sum(q * k[None, :], 1) * scale - known)
        change = share * (tl.sum(g * v[None, :], 1) - delta) * scale
        change_q += change[:, None] * k[None, :]
        tl.store(to_keys + there, tl.sum(change[:, None] * q, 0).to(to_keys.dtype.element_ty), place < SIZE)
        tl.store(to_values + there, tl.sum(share[:, None] * g, 0).to(to_values.dtype.element_ty), place < SIZE)
    tl.store(to_query + here, change_q.to(to_query.dtype.element_ty), inside)


def _sizes(query: torch.Tensor, keys: torch.Tensor) -> tuple[tuple[int, int], dict[str, Any]]:
    rows, heads, size = query.shape
    groups = keys.shape[2]
    shared = heads // groups
    wide, across = triton.next_power_of_2(shared), triton.next_power_of_2(size)
    return (rows, groups), {
        "GROUPS": groups, "SHARED": shared, "SIZE": size, "WIDE": wide, "ACROSS": across, "num_warps": 1,
    }  # fmt: skip


def merge(
    out: torch.Tensor,
    log_sum: torch.Tensor,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `fused.merge`; all contiguous, `log_sum` in float32."""
    merged, total = torch.empty_like(out), torch.empty_like(log_sum)
    grid, sizes = _sizes(query, keys)
    _merge[grid](out, log_sum, query, keys, values, merged, total, scale, len(query), len(keys), **sizes)
    return merged, total


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
    """As `fused.merge_backward`; `to_query` itself is changed and returned."""
    to_keys, to_values = torch.empty_like(keys), torch.empty_like(values)
    grid, sizes = _sizes(query, keys)
    _merge_backward[grid](
        grad, out, log_sum, query, keys, values, to_query, to_keys, to_values, scale, len(query), len(keys), **sizes
    )
    return to_query, to_keys, to_values


@functools.cache
def usable(device: torch.device) -> bool:
    """Do the kernels compile on this card, and give what the plain form gives? Takes a second, once."""
    generator = torch.Generator(device).manual_seed(0)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    query, out, grad, to_query = (numbers(33, 6, 24) for _ in range(4))
    keys, values, log_sum = numbers(2, 33, 3, 24), numbers(2, 33, 3, 24), numbers(6, 33)
    try:
        found = merge(out, log_sum, query, keys, values, 0.2)
        back = merge_backward(grad, *found, query, keys, values, 0.2, to_query.clone())
    except Exception:  # whatever a compiler says on a card it was not made for
        return False
    wanted = fused.merge(out, log_sum, query, keys, values, 0.2)
    wanted_back = fused.merge_backward(grad, *wanted, query, keys, values, 0.2, to_query)
    pairs = zip((*found, *back), (*wanted, *wanted_back), strict=True)
    return all(torch.allclose(a, b, rtol=1e-3, atol=1e-3) for a, b in pairs)
