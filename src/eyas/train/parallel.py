"""Data parallelism: each rank trains on its share of every global batch, gradients are added up over all.

The draft is one layer: its weights, gradients and moments, 16 bytes a parameter, fit every card that a draft of that
width is worth training on (7 GiB at the width of an 8B target, 18 GiB at 7168), so they are replicated. Counts are
added up before the backward pass, since the loss is divided by the positions of the whole global batch; so the result
does not depend on the number of ranks, but for the order of the sums.
"""

import contextlib
import socket
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes


@dataclass(frozen=True)
class World:
    """This process among those that train together; alone by default."""

    rank: int = 0
    size: int = 1

    def device(self, device: torch.device) -> torch.device:
        """This rank's own: the GPU of its number on this host."""
        return torch.device("cuda", self.rank) if device.type == "cuda" else device

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        """Replace each by its sum over all ranks."""
        if self.size > 1:
            for work in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
                work.wait()

    def wait(self) -> None:
        """Until all ranks are here."""
        if self.size > 1:
            dist.barrier()

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


@contextlib.contextmanager
def together(size: int, device: torch.device, work: Callable[..., Any], *arguments: Any) -> Iterator[World]:
    """A world of `size` ranks on this host, this process its first; the others run `work(world, *arguments)`.

    All of them have ended when this returns: well, or because this process's part failed.
    """
    if size == 1:
        yield World()
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    backend = "nccl" if device.type == "cuda" else "gloo"
    threads = max(1, torch.get_num_threads() // size)
    given = (size, address, backend, threads, work, arguments)
    others = [
        processes.get_context("spawn").Process(target=_other, args=(rank, *given), daemon=True)
        for rank in range(1, size)
    ]
    for other in others:
        other.start()
    try:
        with _joined(0, size, address, backend, threads) as world:
            yield world
        for other in others:
            other.join()
    finally:
        for other in others:
            other.terminate()
            other.join()


@contextlib.contextmanager
def _joined(rank: int, size: int, address: str, backend: str, threads: int) -> Iterator[World]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, init_method=address, rank=rank, world_size=size)
    try:
        yield World(rank, size)
    finally:
        dist.destroy_process_group()
        torch.set_num_threads(before)


def _other(
    rank: int, size: int, address: str, backend: str, threads: int, work: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    with _joined(rank, size, address, backend, threads) as world:
        work(world, *arguments)
