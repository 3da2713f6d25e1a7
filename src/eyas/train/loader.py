"""Batches are read, packed and copied by a thread while the ones before them are trained on."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import fields, is_dataclass
from itertools import islice
from typing import Any, Generic, TypeVar

import torch

Item = TypeVar("Item")
Made = TypeVar("Made")


class Loader(Generic[Item, Made]):
    """`load(item)` for each of `items`, in order, up to `ahead` of them in advance; errors come out in their place.

    `waited`: seconds that the consumer has waited so far.
    """

    def __init__(
        self, load: Callable[[Item], Made], items: Iterable[Item], device: torch.device, ahead: int = 2
    ) -> None:
        self.waited = 0.0
        self._load = load
        self._items = iter(items)
        self._ahead = ahead
        on_gpu = device.type == "cuda"
        self._streams = (torch.cuda.Stream(device), torch.cuda.current_stream(device)) if on_gpu else None

    def __iter__(self) -> Iterator[Made]:
        with ThreadPoolExecutor(1, "loader") as pool:
            queue = deque(pool.submit(self._make, item) for item in islice(self._items, self._ahead))
            try:
                while queue:
                    made = self._wait(queue.popleft())
                    queue.extend(pool.submit(self._make, item) for item in islice(self._items, 1))
                    yield made
            finally:
                for future in queue:
                    future.cancel()

    def _wait(self, future: "Future[Made]") -> Made:
        began = time.monotonic()
        made = future.result()
        self.waited += time.monotonic() - began
        return made

    def _make(self, item: Item) -> Made:
        """On a stream of its own, so that copies go beside the GPU's work; they have arrived when this returns."""
        if self._streams is None:
            return self._load(item)
        stream, consumer = self._streams
        with torch.cuda.stream(stream):
            made = self._load(item)
        stream.synchronize()
        for tensor in _tensors(made):
            tensor.record_stream(consumer)
        return made


def _tensors(made: Any) -> Iterator[torch.Tensor]:
    """The tensors on a GPU in what was made: dataclasses, lists and tuples are looked into."""
    if isinstance(made, torch.Tensor):
        if made.is_cuda:
            yield made
    elif is_dataclass(made):
        for field in fields(made):
            yield from _tensors(getattr(made, field.name))
    elif isinstance(made, list | tuple):
        for part in made:
            yield from _tensors(part)
