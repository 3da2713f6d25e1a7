"""Batched greedy answers, with the hidden states kept as they pass: answers and features from one computation."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from eyas.engines.inprocess.target import InProcessTarget, Pass

KEEP_SHARE = 0.9
"""Rows that have ended are dropped once fewer than this share is left."""
PREFILL_ROWS = 16
"""Prompts run together; the fewer, the less padding where their lengths differ."""


@dataclass(frozen=True)
class Answered:
    """One prompt with its answer; with capture also the states of all its t tokens.

    `aux` [t, 3H], `last` [t, H], `argmax` int32 [t]: the target's choice after each answer position and after the
    prompt's last token, -1 elsewhere.
    """

    ids: list[int]
    prompt: int
    aux: torch.Tensor | None = None
    last: torch.Tensor | None = None
    argmax: torch.Tensor | None = None


@torch.inference_mode()
def answer(
    target: InProcessTarget,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    capture: torch.dtype | None = None,
    said: Callable[[int], None] = lambda tokens: None,
) -> list[Answered]:
    """Answer prompts greedily, all at once, each until an end token or `max_new_tokens`.

    capture: the dtype in which states are kept; None: none are. `said(n)` is called for every n new tokens.
    The beginning that all prompts share (a system prompt) is computed once.
    """
    assert all(prompts)
    batch = _Batch(target, prompts, max_new_tokens, capture)
    batch.prefill()
    said(len(prompts))
    while len(batch.rows):
        said(batch.step())
    return [answered for answered in batch.done if answered is not None]


class _Batch:
    """Rows still being answered, side by side; finished ones leave when enough of them have gathered."""

    def __init__(
        self, target: InProcessTarget, prompts: Sequence[Sequence[int]], new: int, capture: torch.dtype | None
    ) -> None:
        self.target, self.prompts, self.new, self.capture = target, prompts, new, capture
        device = target.device
        capacity = max(map(len, prompts)) + new
        count = len(prompts)
        self.done: list[Answered | None] = [None] * count
        self.rows = torch.arange(count)  # which prompt each row is
        self.cache = target.cache(count, capacity)
        self.ids = torch.zeros(count, capacity, dtype=torch.int64, device=device)
        for row, prompt in enumerate(prompts):
            self.ids[row, : len(prompt)] = torch.tensor(prompt, device=device)
        self.prompt = torch.tensor([len(p) for p in prompts], device=device)
        self.known = self.prompt.clone()  # tokens of each row
        self.ended = torch.zeros(count, dtype=torch.bool, device=device)
        self.eos = torch.tensor(target.info.eos_token_ids, device=device)
        if capture is not None:
            width = target.info.hidden_size
            self.aux = torch.zeros(count, capacity, 3 * width, dtype=capture, device=device)
            self.last = torch.zeros(count, capacity, width, dtype=capture, device=device)
            self.argmax = torch.full((count, capacity), -1, dtype=torch.int32, device=device)

    def prefill(self) -> None:
        """Run the prompts and choose each first token."""
        shared = _shared_prefix(self.prompts)
        if shared:
            out = self.target.run(self.ids[:1, :shared], self.cache.view(slice(1)))
            self.cache.spread_first_row(shared)
            self._keep(slice(None), slice(shared), out)
        ends = []
        for first in range(0, len(self.prompt), PREFILL_ROWS):
            rows = slice(first, first + PREFILL_ROWS)
            longest = int(self.prompt[rows].max())
            out = self.target.run(self.ids[rows, shared:longest], self.cache.view(rows))
            self._keep(rows, slice(shared, longest), out)
            row = torch.arange(len(out.last), device=out.last.device)
            ends.append(out.last[row, self.prompt[rows] - 1 - shared])
        self.cache.lengths.copy_(self.prompt)
        self._choose(torch.cat(ends))

    def step(self) -> int:
        """Run each row's newest token and choose the next; returns how many tokens were new.

        A row's last token is run too, so that every token of an answer has its states.
        """
        row = torch.arange(len(self.rows), device=self.known.device)
        place = self.known - 1
        out = self.target.run(self.ids[row, place][:, None], self.cache)
        self.cache.lengths.copy_(self.known)
        if self.capture is not None:
            self.aux[row, place] = out.aux[:, 0].to(self.capture)
            self.last[row, place] = out.last[:, 0].to(self.capture)
        before = int((~self.ended).sum())
        finished = self.ended.clone()
        self._choose(out.last[:, 0])
        self._retire(finished)
        return before

    def _keep(self, rows: slice, places: slice, out: Pass) -> None:
        if self.capture is not None:
            self.aux[rows, places] = out.aux.to(self.capture)
            self.last[rows, places] = out.last.to(self.capture)

    def _choose(self, last_BH: torch.Tensor) -> None:
        open_rows = (~self.ended).nonzero().flatten()
        if not len(open_rows):
            return
        choice = self.target.greedy(last_BH[open_rows])
        place = self.known[open_rows]
        if self.capture is not None:
            self.argmax[open_rows, place - 1] = choice.to(torch.int32)
        self.ids[open_rows, place] = choice
        self.known[open_rows] += 1
        self.ended[open_rows] = torch.isin(choice, self.eos) | (
            self.known[open_rows] - self.prompt[open_rows] == self.new
        )

    def _retire(self, finished: torch.Tensor) -> None:
        """Hand out rows whose last token has been run, and drop them once enough of the batch is idle."""
        for row in finished.nonzero().flatten().tolist():
            place = int(self.rows[row])
            if self.done[place] is None:
                self.done[place] = self._answered(row)
        left = (~finished).nonzero().flatten()
        if len(left) and len(left) > KEEP_SHARE * len(finished):
            return
        self.cache = self.cache.select(left)
        self.rows = self.rows[left.cpu()]
        names = ["ids", "prompt", "known", "ended"] + (["aux", "last", "argmax"] if self.capture is not None else [])
        for name in names:
            setattr(self, name, getattr(self, name)[left])

    def _answered(self, row: int) -> Answered:
        known, prompt = int(self.known[row]), int(self.prompt[row])
        ids = self.ids[row, :known].tolist()
        if self.capture is None:
            return Answered(ids, prompt)
        return Answered(
            ids,
            prompt,
            self.aux[row, :known].cpu().clone(),
            self.last[row, :known].cpu().clone(),
            self.argmax[row, :known].cpu().clone(),
        )


def _shared_prefix(prompts: Sequence[Sequence[int]]) -> int:
    """Length of the beginning that all prompts share, leaving each at least one token of its own; 0 for one prompt."""
    if len(prompts) < 2:
        return 0
    low, high = min(map(list, prompts)), max(map(list, prompts))
    most = min(map(len, prompts)) - 1
    return next((i for i in range(most) if low[i] != high[i]), most)
