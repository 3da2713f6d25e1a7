"""Speculative decoding: the tree of drafted tokens, its verification, and what follows from it."""

import torch
from torch import Tensor


def rotate_input_ids_cpu(
    ids: Tensor, start: Tensor, lens: Tensor, topk_index: Tensor, select_index: Tensor | None = None
) -> None:
    """Shift each request's ids left by one and put its new token at the end."""
    for i, (first, length) in enumerate(zip(start.tolist(), lens.tolist(), strict=True)):
        if length <= 0:
            continue
        ids[first : first + length - 1] = ids[first + 1 : first + length].clone()
        last = first + length - 1 if select_index is None else int(select_index[i])
        ids[last] = topk_index.view(-1)[i].to(ids.dtype)


def fill_accept_out_cache_loc_cpu(accept_index: Tensor, loc: Tensor, out: Tensor) -> None:
    """Cache places of the accepted tokens; -1 in `accept_index` means none."""
    keep = accept_index[accept_index > -1].long()
    out[: keep.numel()] = loc[keep]


def fill_bonus_tokens_cpu(accept_tokens: Tensor, accept_lens: Tensor, bonus: Tensor, stride: int) -> None:
    """The last accepted token of each request."""
    last = torch.arange(accept_lens.numel()) * stride + accept_lens.long() - 1
    bonus.copy_(accept_tokens.view(-1)[last].to(bonus.dtype))


def build_draft_decode_metadata_cpu(
    table: Tensor, rows: Tensor, seq_lens: Tensor, topk: int, steps: int, pool_len: int
) -> Tensor:
    """For each branch of each request the places of its past and of its own drafted tokens."""
    out = torch.zeros((rows.numel() * topk, int(seq_lens.max()) + steps), dtype=table.dtype)
    for i, (row, length) in enumerate(zip(rows.tolist(), seq_lens.tolist(), strict=True)):
        for branch in range(topk):
            out[i * topk + branch, :length] = table[row, :length]
            first = length + branch * steps
            out[i * topk + branch, length : length + steps] = table[row, first : first + steps]
    return out


def build_tree_kernel_efficient_cpu(
    parent_list: Tensor,
    selected: Tensor,
    seq_lens: Tensor,
    mask: Tensor,
    positions: Tensor,
    retrieve: Tensor,
    next_token: Tensor,
    next_sibling: Tensor,
    topk: int,
    depth: int,
    n: int,
    mode: int,
) -> None:
    """Links, positions and the attention mask of the tree of `n` tokens, token 0 being the root."""
    assert int(mode) == 1, "only masks over the drafted tokens (QLEN_ONLY)"
    masks = mask.view(-1)[: seq_lens.numel() * n * n].view(-1, n, n)
    places = positions.view(-1, n)
    for row, length in enumerate(seq_lens.tolist()):
        parents = _parents(selected[row].tolist(), parent_list[row].tolist(), topk, n)
        masks[row].fill_(False)
        masks[row, :, 0] = True
        places[row, 0] = length
        for i in range(n - 1, 0, -1):
            parent = parents[i]
            if parent is None:
                continue
            if next_token[row, parent] != -1:
                next_sibling[row, i] = next_token[row, parent]
            next_token[row, parent] = i
        for i in range(1, n):
            level, at = 0, i
            while at:
                level += 1
                masks[row, i, at] = True
                at = parents[at] or 0
            places[row, i] = length + level
        retrieve[row] = torch.arange(row * n, (row + 1) * n)


def _parents(selected: list[int], parent_list: list[int], topk: int, n: int) -> list[int | None]:
    """The parent of each of the tree's tokens; None for one whose parent was not selected."""
    parents: list[int | None] = [None] * n
    for i in range(1, n):
        group = selected[i - 1] // topk
        if group == 0:
            parents[i] = 0
        elif parent_list[group] in selected:
            parents[i] = selected.index(parent_list[group]) + 1
    return parents


def verify_tree_greedy_cpu(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
) -> None:
    """Walk each tree for as long as a child holds the target's own choice; then comes the bonus token."""
    chosen = target_predict.view(-1)
    for row in range(candidates.shape[0]):
        last = int(retrive_index[row, 0])
        accept_index[row, 0] = last
        accepted = at = 0
        for _ in range(1, accept_index.shape[1]):
            at = int(retrive_next_token[row, at])
            while at != -1 and candidates[row, at] != chosen[last]:
                at = int(retrive_next_sibling[row, at])
            if at == -1:
                break
            predicts[last] = chosen[last]
            accepted += 1
            last = int(retrive_index[row, at])
            accept_index[row, accepted] = last
        accept_token_num[row] = accepted
        predicts[last] = chosen[last]
