"""Bookkeeping of the KV cache: which token of which request lies where."""

import ctypes

from torch import Tensor


def assign_req_to_token_pool_cpu(
    rows: Tensor, table: Tensor, start: Tensor, end: Tensor, loc: Tensor, pool_len: int
) -> None:
    """table[row, start:end] = the next places of `loc`, request by request."""
    used = 0
    for row, first, last in zip(rows.tolist(), start.tolist(), end.tolist(), strict=True):
        table[row, first:last] = loc[used : used + last - first].to(table.dtype)
        used += last - first


def assign_extend_cache_locs_cpu(
    rows: Tensor, table: Tensor, start: Tensor, end: Tensor, out: Tensor, pool_len: int
) -> None:
    """The reverse: `out` = table[row, start:end] of all requests, one behind another."""
    used = 0
    for row, first, last in zip(rows.tolist(), start.tolist(), end.tolist(), strict=True):
        out[used : used + last - first] = table[row, first:last].to(out.dtype)
        used += last - first


def assign_draft_cache_locs_contiguous_cpu(
    rows: Tensor, table: Tensor, seq_lens: Tensor, out: Tensor, pool_len: int, topk: int, steps: int
) -> None:
    """Places of the drafted tokens behind each request."""
    size = topk * steps
    for i, (row, length) in enumerate(zip(rows.tolist(), seq_lens.tolist(), strict=True)):
        out[i * size : (i + 1) * size] = table[row, length : length + size].to(out.dtype)


def copy_all_layer_kv_cache_cpu(data_ptrs: Tensor, strides: Tensor, target: Tensor, source: Tensor) -> None:
    """Copy the rows `source` to the rows `target` in every layer's cache; `strides` are bytes a row."""
    pairs = list(zip(source.tolist(), target.tolist(), strict=True))
    for pointer, size in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        rows = [ctypes.string_at(pointer + size * old, size) for old, _ in pairs]
        for row, (_, new) in zip(rows, pairs, strict=True):
            ctypes.memmove(pointer + size * new, row, size)
