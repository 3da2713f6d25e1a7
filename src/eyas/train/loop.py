"""The training loop: one optimizer step a batch, resumable bit for bit.

The schedule and the order of samples are functions of the step number, so the state is the draft, the optimizer's
moments and that number. Kept as one safetensors file, written atomically.
"""

import json
import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import safetensors
import safetensors.torch
import torch

from eyas.draft import fused
from eyas.draft.loss import Teacher, unrolled_loss
from eyas.draft.model import DraftModel
from eyas.draft.unroll import unroll
from eyas.errors import UserError
from eyas.files import write_atomic
from eyas.train.optimizer import Optimizer
from eyas.train.packing import Batch

if TYPE_CHECKING:
    from eyas.config import Train


@dataclass(frozen=True)
class Step:
    """What one optimizer step was like; `positions`: supervised ones at step 0; `gradient_norm` before clipping."""

    number: int
    loss: float
    learning_rate: float
    gradient_norm: float
    positions: int


class Trainer:
    """A draft in training.

    `head` [D, H]: the target's lm_head rows of the draft vocabulary. `dtype`: of the states and matrix products, None
    for the parameters' own (these, their gradients and the optimizer's moments stay as they are in either case).
    `compile`: on CUDA, compile what stands between the products, about a minute at the first steps.
    """

    def __init__(
        self,
        draft: DraftModel,
        head: torch.Tensor,
        config: "Train",
        steps: int,
        dtype: torch.dtype | None = None,
        compile: bool = True,
    ) -> None:
        self.draft, self.config, self.steps, self.compile = draft, config, steps, compile
        self.dtype = dtype or draft.fc.weight.dtype
        self.head = head.to(self.dtype)
        self.number = 0
        self.loss: float | None = None
        """Of the newest step."""
        self._named = [(name, p) for name, p in draft.named_parameters() if p.requires_grad]
        self._optimizer = Optimizer(self._named, config)

    def learning_rate(self, number: int) -> float:
        """Of optimizer step `number`, counted from 0: linear warm-up, then a cosine down to its floor."""
        c = self.config
        warmup = max(1, round(c.warmup * self.steps))
        floor = c.final_learning_rate
        cosine = floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * number / self.steps))
        return c.learning_rate * min(1.0, (number + 1) / warmup) * cosine

    def step(self, *parts: Batch, names: str = "") -> Step:
        """Train on one batch, given in parts that are packed apart and accumulated.

        A loss or gradient that is no number is a UserError that names step and samples.
        """
        c = self.config
        counts = [sum(column) for column in zip(*(part.chains.counts for part in parts), strict=True)]
        loss = torch.zeros((), device=self.head.device)
        self.draft.work_in(self.dtype)
        with fused.compiling() if self.compile else nullcontext():
            for part in parts:
                loss += self._backward(part, counts)
        norm = torch.nn.utils.clip_grad_norm_([p for _, p in self._named], c.clip)
        value = float(loss)
        if not math.isfinite(value) or not math.isfinite(float(norm)):
            raise UserError(
                f"train: loss {value}, gradient norm {float(norm)} at step {self.number}, samples {names}: "
                "lower train.learning_rate, or remove these samples"
            )
        rate = self.learning_rate(self.number)
        self._optimizer.step(rate)
        self.number += 1
        self.loss = value
        return Step(self.number, value, rate, float(norm), counts[0])

    def _backward(self, part: Batch, counts: list[int]) -> torch.Tensor:
        known = self.draft.t2d[part.argmax] & (part.argmax >= 0)
        outputs = list(unroll(self.draft, part.chains, part.aux))
        teacher = Teacher(part.last, known, self.head, self.config.temperature)
        loss = unrolled_loss(self.draft, part.chains, outputs, teacher, counts, self.config.step_decay)
        if outputs:
            loss.backward()
        return loss.detach()

    def save(self, path: Path) -> None:
        """Write everything that a resumed run needs."""
        state = {name: p.detach() for name, p in self._named} | {"d2t": self.draft.d2t, "t2d": self.draft.t2d}
        state |= self._optimizer.state()
        host = {name: tensor.cpu().contiguous() for name, tensor in state.items()}
        about = {"eyas": json.dumps({"number": self.number, "steps": self.steps, "loss": self.loss})}
        write_atomic(path, safetensors.torch.save(host, metadata=about))

    def restore(self, path: Path) -> None:
        """Go on from a file of `save`. Raises UserError where it belongs to another schedule or is damaged."""
        try:
            with safetensors.safe_open(path, "pt") as file:
                about = json.loads(file.metadata()["eyas"])
                state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (OSError, KeyError, safetensors.SafetensorError) as error:
            raise UserError(f"{path}: damaged training state ({error}); delete it to begin anew") from error
        if about["steps"] != self.steps:
            raise UserError(f"{path}: of a schedule with {about['steps']} steps, not {self.steps}; delete it")
        self.number, self.loss = int(about["number"]), about["loss"]
        with torch.no_grad():
            self.draft.d2t.copy_(state["d2t"])
            self.draft.t2d.copy_(state["t2d"])
            for name, p in self._named:
                p.copy_(state[name])
        self._optimizer.restore({key: value for key, value in state.items() if ":" in key})


def evenly(times: int, steps: int) -> set[int]:
    """Step numbers, 1..steps, at which something that is wanted `times` times is done; the last one is `steps`."""
    return {round(steps * (i + 1) / times) for i in range(times)} - {0}


def mean_loss(steps: Sequence[Step]) -> float:
    """Mean loss of a stretch of steps."""
    return sum(s.loss for s in steps) / len(steps)
