"""The test-time-training unroll over packed samples: which slot works at which step, and what it attends to.

Used by training (`train/loop.py`) and by replay (`decode/replay.py`), so that the acceptance which is predicted comes
from the arithmetic that was trained. Slot t at step k reads its state and the embedding of x[t+1+k] and predicts
x[t+2+k]. Its query sees the step-0 keys at slots <= t of its own document and the keys of steps 1..k at slot t.

Only slots that count are computed: with answer[i] = "x[i] belongs to an answer", slot t counts at step k where
answer[t+1] … answer[t+2+k] all hold. A slot that counts at no step serves the others through its step-0 key and value
alone; slots behind a document's last counting one serve nobody and are left out.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from eyas.draft.model import DraftModel


@dataclass(frozen=True)
class Packed:
    """Samples one after another, without padding.

    `ids` int64 [T]; `answer` bool [T]; `starts` int64 [B+1], the first slot of each document and T at the end.
    """

    ids: torch.Tensor
    answer: torch.Tensor
    starts: torch.Tensor

    def __post_init__(self) -> None:
        assert self.ids.shape == self.answer.shape
        assert int(self.starts[0]) == 0
        assert int(self.starts[-1]) == len(self.ids)


@dataclass(frozen=True)
class StepOutput:
    """What one step of the unroll gives: `hidden` [n, H] (h', before the final norm) of the `slots` int64 [n]."""

    step: int
    slots: torch.Tensor
    hidden: torch.Tensor


def chain_lengths(batch: Packed, steps: int) -> torch.Tensor:
    """How many steps count at each slot: int64 [T], 0..steps; they are always the first ones."""
    total = len(batch.ids)
    place = torch.arange(total + 1, device=batch.ids.device)
    ends = batch.starts[1:].repeat_interleave(batch.starts.diff())
    stop = torch.cat([torch.where(batch.answer, total, place[:-1]), place[-1:]])
    stop = stop.flip(0).cummin(0).values.flip(0)[:-1]  # the next slot that is no answer
    run = torch.minimum(stop, ends) - place[:-1]  # answer tokens from here on, in this document
    ahead = torch.cat([run[1:], run.new_zeros(1)])
    ahead[batch.starts[1:] - 1] = 0
    return (ahead - 1).clamp(0, steps)


def unroll(draft: DraftModel, batch: Packed, aux_TC: torch.Tensor, steps: int) -> Iterator[StepOutput]:
    """Run `steps` steps over a packed batch, yielding each step's states; gradients flow through all of them.

    `aux_TC` [T, 3H] holds the captured states in the draft's dtype. Steps at which no slot counts are not yielded.
    """
    depth = chain_lengths(batch, steps)
    slots = depth.nonzero().flatten()
    if not len(slots):
        return
    keys = _DocumentKeys(draft, batch, aux_TC, slots)
    state = hidden = keys.state_of(slots)
    own: list[tuple[torch.Tensor, torch.Tensor]] = []
    for step in range(steps):
        if step:
            keep = depth[slots] > step
            slots, state = slots[keep], draft.hand_on(hidden)[keep]
            own = [(k[keep], v[keep]) for k, v in own]
        if not len(slots):
            return
        x = draft.inputs(state, batch.ids[slots + 1 + step])
        angles = draft.angles(keys.position(slots) + step, x)
        if step:
            own.append(draft.keys_values(x, angles))
        hidden = draft.finish(keys.attend(draft.queries(x, angles), slots, own), state)
        yield StepOutput(step, slots, hidden)


class _DocumentKeys:
    """Step-0 keys and values of every slot that is still seen, laid out document by document for dense attention."""

    def __init__(self, draft: DraftModel, batch: Packed, aux_TC: torch.Tensor, counting: torch.Tensor) -> None:
        device = batch.ids.device
        document = torch.arange(len(batch.starts) - 1, device=device).repeat_interleave(batch.starts.diff())
        self._place = torch.arange(len(batch.ids), device=device) - batch.starts[document]
        lengths = torch.zeros(len(batch.starts) - 1, dtype=torch.int64, device=device)
        lengths.scatter_reduce_(0, document[counting], self._place[counting] + 1, "amax")
        # Documents in which nothing counts are dropped.
        rows = torch.cumsum(lengths > 0, 0) - 1
        self._row = rows[document]
        seen = (self._place < lengths[document]).nonzero().flatten()
        self._fused = torch.full_like(document, -1)
        self._fused[seen] = torch.arange(len(seen), device=device)
        self._state = draft.fuse(aux_TC[seen])
        x = draft.inputs(self._state, batch.ids[seen + 1])
        key, value = draft.keys_values(x, draft.angles(self._place[seen], x))
        shape = (int((lengths > 0).sum()), int(lengths.max()), *key.shape[1:])
        where = (self._row[seen], self._place[seen])
        self._key = key.new_zeros(shape).index_put(where, key).transpose(1, 2)  # [B, G, L, E]
        self._value = value.new_zeros(shape).index_put(where, value).transpose(1, 2)

    def position(self, slots: torch.Tensor) -> torch.Tensor:
        """Place of slots within their documents."""
        return self._place[slots]

    def state_of(self, slots: torch.Tensor) -> torch.Tensor:
        """The fused states [n, H] of counting slots."""
        return self._state[self._fused[slots]]

    def attend(
        self, query: torch.Tensor, slots: torch.Tensor, own: list[tuple[torch.Tensor, torch.Tensor]]
    ) -> torch.Tensor:
        """Attention [n, A, E] of `query` [n, A, E] at `slots`, over the step-0 keys and the slots' `own` later ones.

        Both parts are exact softmax pieces, merged through their log-sum-exps.
        """
        count, heads, size = query.shape
        groups = self._key.shape[1]
        query = query * size**-0.5
        # Queries of one document side by side: [B, G, Q * A/G, E].
        row = self._row[slots]
        per_row = torch.bincount(row, minlength=self._key.shape[0])
        rank = torch.arange(count, device=slots.device) - (per_row.cumsum(0) - per_row)[row]
        widest = int(per_row.max())
        grid = query.new_zeros(len(per_row), widest, heads, size).index_put((row, rank), query)
        grid = grid.view(len(per_row), widest, groups, heads // groups, size).transpose(1, 2)
        last_seen = slots.new_zeros(len(per_row), widest).index_put((row, rank), self._place[slots])
        hidden_keys = torch.arange(self._key.shape[2], device=slots.device) > last_seen[..., None]  # [B, Q, L]
        scores = (grid.flatten(2, 3) @ self._key.transpose(2, 3)).unflatten(2, (widest, -1))
        scores = scores.masked_fill(hidden_keys[:, None, :, None], float("-inf"))  # [B, G, Q, A/G, L]
        log_sum = scores.logsumexp(-1)
        weights = (scores - log_sum[..., None]).exp()
        attended = (weights.flatten(2, 3) @ self._value).unflatten(2, (widest, -1))

        def flat(x: torch.Tensor) -> torch.Tensor:
            return x.transpose(1, 2)[row, rank].flatten(1, 2)

        out, log_sum = flat(attended), flat(log_sum)  # [n, A, E], [n, A]
        if not own:
            return out
        repeat = heads // groups
        own_scores = torch.stack([(query * k.repeat_interleave(repeat, 1)).sum(-1) for k, _ in own])
        total = torch.logaddexp(log_sum, own_scores.logsumexp(0))
        out = out * (log_sum - total).exp()[..., None]
        for score, (_, value) in zip(own_scores, own, strict=True):
            out = out + (score - total).exp()[..., None] * value.repeat_interleave(repeat, 1)
        return out
