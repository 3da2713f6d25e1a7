"""The optimizers of a draft, and their state by parameter name.

AdamW for everything; or Muon (momentum, orthogonalised by Newton-Schulz iterations) for the matrices of the layer, with
AdamW for the head and the norms. Muon's step is scaled to the size of AdamW's, so one learning rate serves both.
"""

from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from eyas.config import Train


class Optimizer:
    """One or two of PyTorch's optimizers over named parameters."""

    def __init__(self, named: list[tuple[str, nn.Parameter]], config: "Train") -> None:
        self._named = named
        muon = {name for name, p in named if config.optimizer == "muon" and p.dim() == 2 and name != "lm_head.weight"}
        matrices = [p for name, p in named if p.dim() == 2 and name not in muon]
        vectors = [p for _, p in named if p.dim() < 2]
        groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        first, second = config.betas
        self._parts: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(groups, lr=config.learning_rate, betas=(first, second), fused=True)
        ]
        if muon:
            self._parts.append(
                torch.optim.Muon(
                    [p for name, p in named if name in muon],
                    lr=config.learning_rate,
                    weight_decay=config.weight_decay,
                    adjust_lr_fn="match_rms_adamw",
                )
            )

    def step(self, learning_rate: float) -> None:
        """Change the parameters by their gradients, which are dropped."""
        for part in self._parts:
            for group in part.param_groups:
                group["lr"] = learning_rate
            part.step()
            part.zero_grad(set_to_none=True)

    def state(self) -> dict[str, torch.Tensor]:
        """Everything kept between steps, as `<what>:<parameter>`."""
        return {
            f"{what}:{name}": value
            for name, p in self._named
            for part in self._parts
            for what, value in part.state.get(p, {}).items()
        }

    def restore(self, state: dict[str, torch.Tensor]) -> None:
        """Take back what `state` gave."""
        kept: dict[str, dict[str, torch.Tensor]] = {}
        for key, value in state.items():
            what, _, name = key.partition(":")
            kept.setdefault(name, {})[what] = value
        for part in self._parts:
            for group in part.param_groups:
                for p in group["params"]:
                    name = next(n for n, q in self._named if q is p)
                    if name in kept:
                        part.state[p] = {what: value.to(p.device).clone() for what, value in kept[name].items()}
