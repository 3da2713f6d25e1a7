"""What a diagnosis is made on: answered prompts with the target's states at many layers, and how the draft was served.

From a run, these are its captured answers and what the server's draft did on each; from prompts alone, the in-process
target's own answers. States of layers that were not captured come from one pass of the in-process target.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from eyas.decode.acceptance import Tally
from eyas.decode.replay import answer_length, pooled
from eyas.engines.inprocess.generate import answer
from eyas.engines.inprocess.target import InProcessTarget
from eyas.store.shard import Sample

LAST = -1
"""Stands for the last state, after the final norm, where a layer is named."""
BATCH = 32
Layers = tuple[int, int, int]


@dataclass(frozen=True)
class Row:
    """An answered prompt: `states[i]` [t, H] is hidden_states[i], LAST the last one; `served`: what a server did."""

    ids: list[int]
    prompt: int
    states: dict[int, torch.Tensor]
    served: Tally | None = None

    @property
    def answer(self) -> list[int]:
        """The answer's tokens."""
        return self.ids[self.prompt :]

    def sample(self, layers: Layers) -> Sample:
        """With the states of three layers, as replay reads it."""
        ids = torch.tensor(self.ids)
        return Sample(
            key="",
            ids=ids,
            answer=torch.arange(len(ids)) >= self.prompt,
            aux=torch.cat([self.states[layer] for layer in layers], -1),
            last=self.states[LAST],
            argmax=torch.full_like(ids, -1),
        )


def answer_of(sample: Sample) -> list[int]:
    """The tokens of a sample's answer."""
    ids: list[int] = sample.ids[len(sample.ids) - answer_length(sample) :].tolist()
    return ids


def of_sample(sample: Sample, layers: Layers, served: Tally | None) -> Row:
    """A captured sample, whose `aux` are the states of `layers`."""
    states = dict(zip(layers, sample.aux.float().chunk(3, -1), strict=True))
    prompt = len(sample.ids) - answer_length(sample)
    return Row(sample.ids.tolist(), prompt, {**states, LAST: sample.last.float()}, served)


@torch.inference_mode()
def with_states(target: InProcessTarget, row: Row) -> Row:
    """The row with the states of all layers that the target taps, from one pass. Raises UserError: too long for it."""
    ids = torch.tensor([row.ids], device=target.device)
    out = target.run(ids, target.cache(1, len(row.ids)))
    states = zip(target.layers, out.aux[0].cpu().chunk(len(target.layers), -1), strict=True)
    return Row(row.ids, row.prompt, {**dict(states), LAST: out.last[0].cpu()}, row.served)


def answered(target: InProcessTarget, prompts: Sequence[list[int]], max_new_tokens: int) -> list[Row]:
    """The target's own greedy answers, with the states of all layers that it taps; those of one token are left out.

    In the order of `prompts`. Raises UserError: longer than the target's context.
    """
    found = []
    for start in range(0, len(prompts), BATCH):
        for one in answer(target, prompts[start : start + BATCH], max_new_tokens):
            if len(one.ids) - one.prompt > 1:
                found.append(with_states(target, Row(one.ids, one.prompt, {})))
    return found


def observed(rows: Iterable[Row], draft_tokens: int) -> dict[str, Any]:
    """The *acceptance* as served, of rows that were."""
    return pooled([(row.answer, row.served) for row in rows if row.served is not None], draft_tokens)
