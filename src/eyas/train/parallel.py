"""Data parallelism: each rank trains on its share of every global batch, gradients are added up over all.

The draft is one layer: its weights, gradients and moments, 16 bytes a parameter, fit every card that a draft of that
width is worth training on (7 GiB at the width of an 8B target, 18 GiB at 7168), so they are replicated. Counts are
added up before the backward pass, since the loss is divided by the positions of the whole global batch; so the result
does not depend on the number of ranks, but for the order of the sums.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class World:
    """This process among those that train together; alone by default."""

    rank: int = 0
    size: int = 1

    @classmethod
    def join(cls, device: torch.device) -> "World":
        """Join the others that torchrun has started beside this process; alone without it."""
        if "WORLD_SIZE" not in os.environ:
            return cls()
        if device.type == "cuda":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        if not dist.is_initialized():
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        return cls(dist.get_rank(), dist.get_world_size())

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        """Replace each by its sum over all ranks."""
        if self.size > 1:
            for work in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
                work.wait()

    def share(self, lengths: list[int]) -> list[int]:
        """Which of a global batch's samples are this rank's: long ones first, each to the rank with least to do.

        In order, the same on every rank, all ranks together exactly all samples.
        """
        loads, shares = [0] * self.size, [[] for _ in range(self.size)]  # type: tuple[list[int], list[list[int]]]
        for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
            least = loads.index(min(loads))
            loads[least] += lengths[i]
            shares[least].append(i)
        return sorted(shares[self.rank])
