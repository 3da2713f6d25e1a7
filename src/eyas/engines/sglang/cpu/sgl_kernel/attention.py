"""The two attention operators of SGLang's "intel_amx" backend. Rows are [tokens, heads, width]."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None = None, cap: float = 0.0) -> Tensor:
    q, k, v = (rows.transpose(0, 1).float() for rows in (q, k, v))
    groups = q.shape[0] // k.shape[0]
    if groups > 1:
        k, v = k.repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)
    if not cap:
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale).transpose(0, 1)
    scores = cap * torch.tanh((q @ k.transpose(1, 2)) * scale / cap)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return (scores.softmax(-1) @ v).transpose(0, 1)


def _decode(
    q: Tensor, k_buffer: Tensor, v_buffer: Tensor, k_scale: float, v_scale: float, out: Tensor, key: Tensor | None,
    value: Tensor | None, loc: Tensor, logits: Tensor, table: Tensor, rows: Tensor, seq_lens: Tensor, scale: float,
    cap: float, is_cross: bool, window: int, encoder_lens: Any, sinks: Any,
) -> None:  # fmt: skip
    assert sinks is None
    if key is not None and value is not None and not is_cross:
        k_buffer[loc] = key.view(-1, *k_buffer.shape[1:]).to(k_buffer.dtype)
        if v_buffer.data_ptr() != k_buffer.data_ptr():  # MLA: V is a view of the start of K.
            v_buffer[loc] = value.view(-1, *v_buffer.shape[1:]).to(v_buffer.dtype)
    for i, (row, length) in enumerate(zip(rows.tolist(), seq_lens.tolist(), strict=True)):
        first = max(0, length - window) if window > 0 else 0
        past = table[row, first:length].long()
        out[i] = _attend(q[i : i + 1], k_buffer[past], v_buffer[past], scale, None, cap)[0].to(out.dtype)


def _extend(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, k_buffer: Tensor, v_buffer: Tensor, k_scale: float, v_scale: float,
    table: Tensor, rows: Tensor, seq_lens: Tensor, new: Tensor, start: Tensor, longest: int, scale: float, cap: float,
    is_cross: bool, window: int, encoder_lens: Any, sinks: Any, tree_mask: Tensor | None, causal: bool,
) -> None:  # fmt: skip
    assert sinks is None
    # MLA prefill without a prefix comes with keys and values written out; with one, in the absorbed form of the cache.
    absorbed = k is None or k.shape[1:] == k_buffer.shape[1:]
    drafted = int(new[0]) if tree_mask is not None else 0
    lists = (rows.tolist(), seq_lens.tolist(), new.tolist(), start.tolist())
    for i, (row, length, count, first) in enumerate(zip(*lists, strict=True)):
        if count == 0:
            continue
        if absorbed:
            past = table[row, :length].long()
            keys, values = k_buffer[past], v_buffer[past]
        else:
            assert count == length, "a prefix needs the absorbed form"
            keys, values = k[first : first + count], v[first : first + count]
        mask = None
        if causal:
            at, seen = torch.arange(length - count, length)[:, None], torch.arange(length)[None]
            mask = seen <= at
            if window > 0:
                mask &= seen > at - window
        if tree_mask is not None:
            mask = torch.ones(count, length, dtype=torch.bool)
            size = drafted * drafted
            mask[:, length - count :] = tree_mask.view(-1)[i * size : (i + 1) * size].view(drafted, drafted)
        mine = slice(first, first + count)
        out[mine] = _attend(q[mine], keys, values, scale, mask, cap).to(out.dtype)


_library = torch.library.Library("sgl_kernel", "FRAGMENT")
_library.define(
    "decode_attention_cpu(Tensor query, Tensor(a!) k_buffer, Tensor(b!) v_buffer, float ks, float vs,"
    " Tensor(c!) output, Tensor? key, Tensor? value, Tensor loc, Tensor attn_logits, Tensor req_to_token,"
    " Tensor req_pool_indices, Tensor seq_lens, float sm_scale, float logit_cap, bool is_cross_attn,"
    " int sliding_window, Tensor? encoder_lens, Tensor? sinks) -> ()"
)
_library.impl("decode_attention_cpu", _decode, "CPU")
_library.define(
    "extend_attention_cpu(Tensor q, Tensor? k, Tensor? v, Tensor(a!) o, Tensor k_buffer, Tensor v_buffer,"
    " float ks, float vs, Tensor req_to_token, Tensor req_pool_indices, Tensor seq_lens,"
    " Tensor extend_seq_lens, Tensor extend_start_loc, int max_len_extend, float sm_scale, float logit_cap,"
    " bool is_cross_attn, int sliding_window, Tensor? encoder_lens, Tensor? sinks, Tensor? tree_mask,"
    " bool is_causal) -> ()"
)
_library.impl("extend_attention_cpu", _extend, "CPU")
