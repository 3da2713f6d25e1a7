"""Attempts at writing a store that may be killed at any byte, for tests/unit/test_store_kill.py.

Run as a program it answers each line `SEED FOLDER` by forking a child that makes one attempt; the child says its pid,
then what has become durable. Importing PyTorch takes seconds, a fork none.
"""

import os
import random
import sys
from pathlib import Path

import torch

from eyas.capture.contract import Contract
from eyas.progress import Silent
from eyas.store import tend
from eyas.store.layout import Layout
from eyas.store.sample import Sample, place
from eyas.store.store import create
from eyas.store.writer import ShardWriter, partial

CONTRACT = Contract(1, "m", "t", "c", (2, 15, 27), True, "bfloat16", 64, 100, "inprocess", "5.0", {})
SHARDS, SAMPLES = 3, 8


def sample(number: int) -> Sample:
    """Sample `number` of all that there are; its states follow from the number."""
    tokens = 20 + 37 * number % 90
    generator = torch.Generator().manual_seed(number)
    states = torch.randn(tokens, 4 * 64, generator=generator).bfloat16()
    ids = torch.randint(0, 100, (tokens,), generator=generator)
    return Sample(f"s{number}", ids, torch.arange(tokens) >= 9, states[:, :192], states[:, 192:], ids)


def samples(shard: int) -> list[Sample]:
    """The samples of a shard; the first one of each never comes."""
    return [sample(SAMPLES * shard + i) for i in range(SAMPLES)]


def attempt(folder: Path, seed: int, say) -> None:
    """Write all samples that are not there, in any order, by two writers; then the stores, and both merged into one."""
    order = random.Random(seed)
    for number in range(SHARDS):
        path = folder / f"{number}.safetensors"
        if path.exists():
            continue
        wanted = samples(number)
        layout = Layout([place(one, complete=False) for one in wanted], 64, torch.bfloat16)
        first = ShardWriter.reopen(path) if partial(path).exists() else ShardWriter.create(path, layout)
        writers = [first, ShardWriter.reopen(path)]
        left = [one for one in wanted[1:] if one.key not in first.done]
        order.shuffle(left)
        for one in left:
            writer = order.choice(writers)
            writer.put(one)
            if order.random() < 0.5:
                writer.commit()
                say(" ".join(sorted(writer.done)))
        writers[1].commit()
        writers[1].close()
        first.finish()
    paths = [folder / f"{number}.safetensors" for number in range(SHARDS)]
    create(folder / "a", CONTRACT, paths[:1])
    create(folder / "b", CONTRACT, paths[1:])
    if not (folder / "merged").exists():
        tend.merge(folder / "merged", [folder / "a", folder / "b"], Silent())
    say("finished")


def main() -> None:
    """Serve attempts."""
    torch.set_num_threads(1)
    while line := sys.stdin.readline():
        seed, folder = line.split(maxsplit=1)
        child = os.fork()
        if child == 0:
            print(os.getpid(), flush=True)
            attempt(Path(folder.strip()), int(seed), lambda text: print(text, flush=True))
            os._exit(0)
        sys.stdin.readline()  # until then its pid is its own, so that it can be killed
        os.waitpid(child, 0)
        print("gone", flush=True)


if __name__ == "__main__":
    main()
