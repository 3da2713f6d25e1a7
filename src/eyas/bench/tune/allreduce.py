"""One rank of the stand-alone all-reduce, run by the server's interpreter. Imports torch and nothing of eyas.

`allreduce.py ORDERS`: a JSON object with `backend`, `rendezvous` (a file), `elements` (of each message), `dtype`,
`first` (GPU of rank 0), `repeats` and `calls`. RANK and WORLD_SIZE are torchrun's. Rank 0 prints `{"seconds": [[…] for
each message]}`: seconds of one all-reduce, the mean of `calls` in a row, `repeats` times. A wrong sum ends it. When
stdin closes, whoever started it has gone, and it ends too.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

BEGIN = "eyas-allreduce "
WARM_UP = 3


def main() -> None:
    """Join the group, time every message, leave."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    import torch
    import torch.distributed as dist

    orders: dict[str, Any] = json.loads(sys.argv[1])
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    cuda = orders["backend"] == "nccl"
    device = torch.device("cuda", orders["first"] + rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(
        orders["backend"], init_method=f"file://{orders['rendezvous']}", rank=rank, world_size=world
    )
    seconds = []
    for elements in orders["elements"]:
        message = torch.full((elements,), float(rank + 1), dtype=getattr(torch, orders["dtype"]), device=device)
        dist.all_reduce(message)
        wanted = world * (world + 1) / 2
        if not bool((message == wanted).all()):
            sys.exit(f"WrongSum: an all-reduce of {elements} elements gave {message[message != wanted][0].item()}")
        message.zero_()  # sums of zeros stay zero however often they are taken
        seconds.append(_timed(message, orders["calls"], orders["repeats"], cuda))
    dist.barrier()
    if rank == 0:
        print(BEGIN + json.dumps({"seconds": seconds}), flush=True)
    dist.destroy_process_group()


def _timed(message: Any, calls: int, repeats: int, cuda: bool) -> list[float]:
    """On a GPU the calls are captured into a graph, as in a decode step: else their launches would be timed."""
    import torch
    import torch.distributed as dist

    def row() -> None:
        for _ in range(calls):
            dist.all_reduce(message)

    run: Callable[[], object] = row
    if cuda:
        row()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Other threads, such as the watchdog of the process group, may go on asking the device.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            row()
        run = graph.replay
    found = []
    for turn in range(WARM_UP + repeats):
        dist.barrier()
        if cuda:
            torch.cuda.synchronize()
        began = time.perf_counter()
        run()
        if cuda:
            torch.cuda.synchronize()
        if turn >= WARM_UP:
            found.append((time.perf_counter() - began) / calls)
    return found


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    main()
