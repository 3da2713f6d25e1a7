"""The test-time-training unroll over packed samples.

Used by training (`train/loop.py`) and by replay (`decode/replay.py`), so that the acceptance which is predicted comes
from the arithmetic that was trained. Which slots work, and what they read, is said by `draft/chains.py`.
"""

from collections.abc import Iterator

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
    state, x, angles = seen[chains.state_row], x[chains.state_row], _rows(angles, chains.state_row)
    if chains.keys is not None:
        key, value = key[chains.keys], value[chains.keys]
    own: list[tuple[torch.Tensor, torch.Tensor]] = []
    for step in range(sum(count > 0 for count in chains.counts)):
        if step:
            ids = torch.cat([chains.next_ids[step:], chains.next_ids[:step]])  # the last rows count no more
            x = draft.inputs(state, ids)
            angles = draft.angles(chains.place + step, x)
            own.append(draft.keys_values(x, angles))
        attended = attend(chains, draft.queries(x, angles), key, value, own)
        hidden = draft.finish(attended, state)
        yield hidden
        state = draft.hand_on(hidden)


def _rows(angles: tuple[torch.Tensor, torch.Tensor], rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return angles[0][rows], angles[1][rows]
