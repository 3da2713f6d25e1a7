"""Speculative decoding in-process: the draft guesses a chain, the target judges it in one pass; lossless.

Rows of a batch advance by different amounts; target and draft each keep a ragged cache. A round for a row whose
newest token is x[m-1], not yet seen by the target:

1. The draft takes in the slots up to m-2 that it has not seen with the target's own states, then feeds on its own
   state for further tokens; these guesses' keys lie behind its cache's length and are overwritten next round.
2. The target runs x[m-1] and the guesses in one pass; it accepts the guesses up to the first that it would not say
   (`decode/sample.py`), and its own token after the last accepted one comes for free.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from eyas.decode.acceptance import Tally
from eyas.decode.sample import Greedy, Judge
from eyas.draft.model import DraftModel
from eyas.engines.inprocess.cache import KVCache, Window
from eyas.engines.inprocess.target import InProcessTarget


@dataclass(frozen=True)
class Decoded:
    """A prompt with its answer, and what the draft contributed."""

    ids: list[int]
    prompt: int
    tally: Tally


class _Drafter:
    """The draft with its cache, for a batch of rows."""

    def __init__(self, draft: DraftModel, rows: int, capacity: int, dtype: torch.dtype, device: torch.device) -> None:
        self.draft = draft
        c = draft.config
        self.groups = c.num_attention_heads // c.num_key_value_heads
        self.cache = KVCache.empty(1, rows, c.num_key_value_heads, capacity, c.head_dim, dtype, device)

    def _layer(self, state: torch.Tensor, next_ids: torch.Tensor) -> torch.Tensor:
        """One pass of the layer behind the cache; `state` [B, Q, H], `next_ids` [B, Q] -> h' [B, Q, H]."""
        batch, new, _ = state.shape
        window = Window.behind(self.cache, new)
        x = self.draft.inputs(state.flatten(0, 1), next_ids.flatten())
        angles = self.draft.angles(window.positions.flatten(), x)
        query = self.draft.queries(x, angles)
        key, value = self.draft.keys_values(x, angles)
        query, key, value = (part.unflatten(0, (batch, new)).transpose(1, 2) for part in (query, key, value))
        attended = window.attend(0, query, key, value, window.mask(self.groups, x.dtype))
        return self.draft.finish(attended.flatten(0, 1), state.flatten(0, 1)).view_as(state)

    def guess(self, aux: torch.Tensor, next_ids: torch.Tensor, fresh: torch.Tensor, steps: int) -> torch.Tensor:
        """Take in `fresh` [B] new slots of each row, then guess `steps` tokens: target ids int64 [B, steps].

        `aux` [B, Q, 3H] and `next_ids` [B, Q] hold the new slots' states and following tokens, padded at the end.
        """
        row = torch.arange(len(fresh), device=fresh.device)
        hidden = self._layer(self.draft.fuse(aux), next_ids)[row, fresh - 1][:, None]
        taken = self.cache.lengths + fresh
        self.cache.lengths.copy_(taken)
        target_ids = self.draft.target_ids
        guesses: list[torch.Tensor] = []
        for step in range(steps):
            if step:
                hidden = self._layer(self.draft.hand_on(hidden), guesses[-1][:, None])
                self.cache.lengths += 1
            guesses.append(target_ids[self.draft.logits(hidden[:, 0]).argmax(-1)])
        self.cache.lengths.copy_(taken)
        return torch.stack(guesses, 1)


@torch.inference_mode()
def decode(
    target: InProcessTarget,
    draft: DraftModel,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    draft_tokens: int,
    said: Callable[[int], None] = lambda tokens: None,
    judge: Judge | None = None,
) -> list[Decoded]:
    """Answer prompts with a draft, by default greedily: then, in float32, the tokens equal plain decoding's.

    `said(n)` is called for every n new tokens. Prompts have at least two tokens.
    """
    judge = judge or Greedy(target)
    assert all(len(p) >= 2 for p in prompts)
    device, rows = target.device, len(prompts)
    longest = max(map(len, prompts)) + max_new_tokens
    capacity = longest + draft_tokens
    cache = target.cache(rows, longest, spare=draft_tokens)
    drafter = _Drafter(draft, rows, capacity, target.dtype, device)
    ids = torch.zeros(rows, capacity, dtype=torch.int64, device=device)
    for i, prompt in enumerate(prompts):
        ids[i, : len(prompt)] = torch.tensor(prompt, device=device)
    begin = torch.tensor([len(p) for p in prompts], device=device)
    out = target.run(ids[:, : int(begin.max())], cache)
    row = torch.arange(rows, device=device)
    ids[row, begin] = judge.first(out.last[row, begin - 1])
    cache.lengths.copy_(begin)
    known, aux, fresh = begin + 1, out.aux, begin  # aux: states of the slots that the draft has not taken in
    tallies = [Tally(draft_tokens, rows=1) for _ in prompts]
    finished: list[Decoded | None] = [None] * rows
    place = list(range(rows))
    said(rows)

    def leave(ended: list[bool]) -> torch.Tensor:
        for i, over in enumerate(ended):
            if over:
                finished[place[i]] = Decoded(ids[i, : int(known[i])].tolist(), int(begin[i]), tallies[place[i]])
        return torch.tensor([i for i, over in enumerate(ended) if not over], dtype=torch.int64, device=device)

    ends = set(target.info.eos_token_ids)
    stay = leave([int(ids[i, begin[i]]) in ends or max_new_tokens == 1 for i in range(rows)])
    while True:
        if len(stay) < len(place):
            place = [place[i] for i in stay.tolist()]
            cache, drafter.cache = cache.select(stay), drafter.cache.select(stay)
            ids, begin, known, aux, fresh = ids[stay], begin[stay], known[stay], aux[stay], fresh[stay]
            row = torch.arange(len(place), device=device)
        if not place:
            return [d for d in finished if d is not None]
        widest = int(fresh.max())
        slot = drafter.cache.lengths[:, None] + torch.arange(widest, device=device)
        guesses = drafter.guess(aux[:, :widest], ids.gather(1, slot + 1), fresh, draft_tokens)
        chain = torch.cat([ids[row, known - 1][:, None], guesses], 1)
        out = target.run(chain, cache)
        accepted, choices = judge(out.last, guesses)
        over, advance = [], []
        for i, (count, said_here) in enumerate(zip(accepted.tolist(), choices.tolist(), strict=True)):
            new = said_here[: count + 1][: max_new_tokens - int(known[i] - begin[i])]
            stop = next((n + 1 for n, token in enumerate(new) if token in ends), None)
            new = new[:stop]
            ids[i, known[i] : known[i] + len(new)] = torch.tensor(new, device=device)
            over.append(stop is not None or int(known[i] - begin[i]) + len(new) == max_new_tokens)
            room = min(draft_tokens, len(new)) if over[-1] else draft_tokens
            kept = min(count, len(new))
            tallies[place[i]].add_round(min(kept + 1, room), kept)
            advance.append(len(new))
        said(sum(advance))
        fresh = torch.tensor(advance, device=device)
        known = known + fresh
        cache.lengths.copy_(known - 1)
        aux = out.aux
        stay = leave(over)
