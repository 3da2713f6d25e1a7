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
from eyas.train.parallel import World

if TYPE_CHECKING:
    from eyas.config import Train


ALONE = World()


@dataclass(frozen=True)
class Step:
    """What one optimizer step was like. To ask waits until it is done; a figure that is no number is a UserError."""

    number: int
    learning_rate: float
    names: str
    figures: torch.Tensor
    """float64 [3] on the host: loss, gradient norm before clipping, positions that count at step 0."""
    arrived: torch.cuda.Event | None
    """When they are there."""

    @property
    def loss(self) -> float:
        return self._read()[0]

    @property
    def gradient_norm(self) -> float:
        return self._read()[1]

    @property
    def positions(self) -> int:
        return int(self._read()[2])

    def check(self) -> None:
        """Raise the UserError if there is reason."""
        self._read()

    def _read(self) -> list[float]:
        if self.arrived is not None:
            self.arrived.synchronize()
        loss, norm, positions = self.figures.tolist()
        if not math.isfinite(loss) or not math.isfinite(norm):
            raise UserError(
                f"train: loss {loss}, gradient norm {norm} at step {self.number - 1}, samples {self.names}: "
                "lower train.learning_rate, or remove these samples"
            )
        return [loss, norm, positions]


class Trainer:
    """A draft in training.

    `head` [D, H]: the target's lm_head rows of the draft vocabulary. `dtype`: of the states and matrix products, None
    for the parameters' own (these, their gradients and the optimizer's moments stay as they are in either case).
    `compile`: on CUDA, compile what stands between the products, about a minute at the first steps. `world`: the
    processes that train together; each is given its own parts of every batch.
    """

    def __init__(
        self,
        draft: DraftModel,
        head: torch.Tensor,
        config: "Train",
        steps: int,
        dtype: torch.dtype | None = None,
        compile: bool = True,
        world: World = ALONE,
    ) -> None:
        self.draft, self.config, self.steps = draft, config, steps
        self.compile, self.world = compile, world
        self.dtype = dtype or draft.fc.weight.dtype
        self.head = head.to(self.dtype)
        self.number = 0
        self._newest: Step | None = None
        self._loss: float | None = None
        self._named = [(name, p) for name, p in draft.named_parameters() if p.requires_grad]
        self._optimizer = Optimizer(self._named, config)

    def learning_rate(self, number: int) -> float:
        """Of optimizer step `number`, counted from 0: linear warm-up, then a cosine down to its floor."""
        c = self.config
        warmup = max(1, round(c.warmup * self.steps))
        floor = c.final_learning_rate
        cosine = floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * number / self.steps))
        return c.learning_rate * min(1.0, (number + 1) / warmup) * cosine

    @property
    def loss(self) -> float | None:
        """Of the newest step."""
        return self._loss if self._newest is None else self._newest.loss

    def step(self, *parts: Batch, names: str = "") -> Step:
        """Train on one batch, given in parts that are packed apart and accumulated.

        A loss or gradient that is no number is a UserError that names step and samples: at once on a processor, on a
        GPU at the next step, so that it never waits; nothing spoiled is ever saved.
        """
        device = self.head.device
        self.draft.work_in(self.dtype)
        counts = torch.zeros(self.config.ttt_steps, dtype=torch.float64, device=device)
        for part in parts:
            counts += part.chains.counts
        self.world.add([counts])
        loss = torch.zeros((), dtype=torch.float64, device=device)
        with fused.compiling() if self.compile else nullcontext():
            for part in parts:
                loss += self._backward(part, counts)
        self._add_up(loss)
        norm = torch.nn.utils.clip_grad_norm_([p for _, p in self._named], self.config.clip)
        before, rate = self._newest, self.learning_rate(self.number)
        self._optimizer.step(rate)
        self.number += 1
        self._newest = Step(self.number, rate, names, *_to_host(torch.stack([loss, norm.double(), counts[0]])))
        checked = self._newest if device.type == "cpu" else before
        if checked is not None:
            checked.check()
        return self._newest

    def _add_up(self, loss: torch.Tensor) -> None:
        if self.world.size > 1:
            for _, p in self._named:
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            self.world.add([loss, *(p.grad for _, p in self._named if p.grad is not None)])

    def _backward(self, part: Batch, counts: torch.Tensor) -> torch.Tensor:
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
        self.number, self._loss, self._newest = int(about["number"]), about["loss"], None
        with torch.no_grad():
            self.draft.d2t.copy_(state["d2t"])
            self.draft.t2d.copy_(state["t2d"])
            for name, p in self._named:
                p.copy_(state[name])
        self._optimizer.restore({key: value for key, value in state.items() if ":" in key})


def _to_host(figures: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event | None]:
    """A copy on the host, and when it will be there: to ask the device itself would wait for all that it has to do."""
    if not figures.is_cuda:
        return figures, None
    host = torch.empty(figures.shape, dtype=figures.dtype, pin_memory=True).copy_(figures, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record()
    return host, arrived


def evenly(times: int, steps: int) -> set[int]:
    """Step numbers, 1..steps, at which something that is wanted `times` times is done; the last one is `steps`."""
    return {round(steps * (i + 1) / times) for i in range(times)} - {0}


def mean_loss(steps: Sequence[Step]) -> float:
    """Mean loss of a stretch of steps."""
    return sum(s.loss for s in steps) / len(steps)
