"""The loss: cross-entropy against the target's own next-token distribution, restricted to the draft vocabulary.

A position whose full-vocabulary argmax lies outside the draft vocabulary carries no loss (the position still counts in
the denominator); in every acceptance figure it is a miss.

Logits of the draft and of the target are made a part at a time, label by label: all steps that are judged at one
position share the target's distribution. The gradient is taken at once, while the part's logits are there, so nothing
of [T, D] is ever held and no product is made twice.

Shapes: n rows, N judgements (a row at a step), H hidden, D draft vocabulary.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from eyas.draft import fused
from eyas.draft.chains import Chains
from eyas.draft.model import DraftModel
from eyas.draft.product import Projection, add_product

PART = 1 << 27
"""Logits of the draft that are held at once."""


@dataclass(frozen=True)
class Teacher:
    """What a batch is judged by: `last` [n, H], the target's last state after its final norm at each row's label;
    `known` bool [n]: its full-vocabulary greedy choice there is in the draft vocabulary; `head` [D, H]: the target's
    rows of the draft vocabulary, in the dtype of `last`. Its logits are divided by `temperature`."""

    last: torch.Tensor
    known: torch.Tensor
    head: torch.Tensor
    temperature: float = 1.0

    def distributions(self, labels: slice) -> torch.Tensor:
        """Of some labels: [l, D], in float32 or wider."""
        states = self.last[labels]
        if states.is_cuda and states.dtype == torch.bfloat16:
            logits = torch.mm(states, self.head.T, out_dtype=torch.float32)
        else:
            logits = fused.wide(states @ self.head.T)
        return (logits / self.temperature).softmax(-1)


def unrolled_loss(
    draft: DraftModel,
    chains: Chains,
    outputs: Sequence[torch.Tensor],
    teacher: Teacher,
    counts: torch.Tensor,
    decay: float,
) -> torch.Tensor:
    """Sum over steps of decay^k * (the step's losses) / counts[k], in float32 or wider.

    `outputs`: h' [n, H] of each step. `counts` [steps]: positions that count at each step over the global batch (the
    sum of `chains.counts` over its parts), so that parts of a batch may be accumulated.
    """
    if not outputs:
        return fused.wide(draft.lm_head.weight.new_zeros(()))
    normed = torch.cat([draft.norm(hidden) for hidden in outputs])
    power = torch.arange(len(counts), device=counts.device, dtype=torch.float64)
    scales = decay**power / counts.clamp_min(1)
    return _Loss.apply(normed, draft.lm_head.weight, draft.lm_head, chains, teacher, scales)


def _parts(before: Sequence[int], size: int) -> Iterator[tuple[slice, slice]]:
    """Labels and their judgements, about `size` judgements at once; whole labels, at least one."""
    first = 0
    while first < len(before) - 1:
        stop = max(first + 1, bisect_right(before, before[first] + size) - 1)
        yield slice(first, stop), slice(before[first], before[stop])
        first = stop


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        normed: torch.Tensor,
        weight: torch.nn.Parameter,
        lm_head: Projection,
        chains: Chains,
        teacher: Teacher,
        scales: torch.Tensor,
    ) -> torch.Tensor:
        head, learning = lm_head.used(normed.dtype), any(ctx.needs_input_grad)
        total = fused.wide(normed.new_zeros(()))
        scales = scales.to(total)
        to_normed, to_weight = torch.zeros_like(normed) if learning else None, None
        rows = chains.judged_row + chains.judged_step * len(chains)
        weights = scales[chains.judged_step] * teacher.known[chains.label]
        for labels, part in _parts(chains.judged_before, PART // len(head)):
            states = normed[rows[part]]
            wanted = teacher.distributions(labels)
            label = chains.label[part] - labels.start
            each, gradient = fused.cross_entropy(states @ head.T, wanted, label, weights[part])
            total += each.sum()
            if to_normed is not None:
                to_normed[rows[part]] = gradient @ head
                to_weight = add_product(to_weight, gradient.T, states, weight.dtype)
        ctx.weight = weight
        ctx.save_for_backward(*([to_normed, to_weight] if learning else []))
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        to_normed, to_weight = ctx.saved_tensors
        if ctx.weight.requires_grad:
            to_weight = to_weight.mul_(grad.to(to_weight.dtype))
            ctx.weight.grad = to_weight if ctx.weight.grad is None else ctx.weight.grad.add_(to_weight)
        return to_normed * grad.to(to_normed.dtype), None, None, None, None, None
