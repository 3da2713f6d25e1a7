"""The test-time-training unroll over packed samples.

Used by training (`train/loop.py`) and by replay (`decode/replay.py`), so that the acceptance which is predicted comes
from the arithmetic that was trained. Which slots work, and what they read, is said by `draft/chains.py`.
"""

from collections.abc import Iterator
from typing import Any

import torch

from eyas.draft.attention import attend
from eyas.draft.chains import Chains
from eyas.draft.model import DraftModel


def unroll(draft: DraftModel, chains: Chains, aux_SC: torch.Tensor) -> Iterator[torch.Tensor]:
    """Run the steps of `chains`, yielding each one's states h' [n, H] of all rows, before the final norm.

    `aux_SC` [s, 3H] holds the captured states of `chains.seen` in the dtype to work in. Gradients flow through all
    steps. A row keeps its place behind its last counting step: what it holds there is of no use and reaches no other
    row. Steps at which no row counts are not yielded.
    """
    if not len(chains):
        return
    seen = draft.fuse(aux_SC)
    x = draft.inputs(seen, chains.seen_next_ids)
    angles = draft.angles(chains.seen_place, x)
    key, value = draft.keys_values(x, angles)
    state = seen
    if chains.state_row is not None:
        state, x = _Rows.apply(seen, chains.state_row), _Rows.apply(x, chains.state_row)
        angles = angles[0][chains.state_row], angles[1][chains.state_row]
    if chains.keys is not None:
        key, value = key[chains.keys], value[chains.keys]
    own: list[tuple[torch.Tensor, torch.Tensor]] = []
    for step in range(chains.steps):
        if step:
            x = draft.inputs(state, chains.next_ids.roll(-step))  # the last rows, wrapped around, count no more
            angles = draft.angles(chains.place + step, x)
            own.append(draft.keys_values(x, angles))
        attended = attend(chains, draft.queries(x, angles), key, value, own)
        hidden = draft.finish(attended, state)
        yield hidden
        state = draft.hand_on(hidden)


class _Rows(torch.autograd.Function):
    """x[rows] where no row occurs twice: its gradient is put in place, not added up."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows)
        ctx.count = len(x)
        return x[rows]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (rows,) = ctx.saved_tensors
        return grad.new_zeros(ctx.count, *grad.shape[1:]).index_copy_(0, rows, grad), None
