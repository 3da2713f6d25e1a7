"""Fills a disk of 2 MB, in a mount namespace of its own, then goes on with a larger one: `fulldisk.py FOLDER`."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import torch

from eyas.errors import UserError
from eyas.files import plain_os_errors
from eyas.store.filling import Filling
from eyas.store.sample import place
from storefuzz import CONTRACT, sample

SAMPLES = [replace(sample(1), key=f"k{i}") for i in range(100)]  # 29 kB each


def fill(folder: Path) -> Filling:
    """One attempt."""
    filling = Filling(folder, "x", CONTRACT.hidden_size, torch.bfloat16)
    filling.resume({one.key for one in SAMPLES}.__contains__)
    left = [one for one in SAMPLES if one.key not in filling.kept]
    print("left", len(left), flush=True)
    filling.plan([place(one) for one in left], 600 << 10, 4096)
    try:
        for one in left:
            filling.put([one])
    finally:
        filling.close()
    filling.finish()
    return filling


def main() -> None:
    """Mount, fill, enlarge, go on."""
    folder = Path(sys.argv[1])
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(folder)], check=True)
    try:
        with plain_os_errors(folder):
            fill(folder)
    except UserError as error:
        print("stopped", error, flush=True)
    print("files", *sorted(path.name for path in folder.iterdir()), flush=True)
    subprocess.run(["mount", "-o", "remount,size=8m", str(folder)], check=True)
    filling = fill(folder)
    assert {key for shard in filling.shards for key in shard.keys} == {one.key for one in SAMPLES}
    assert not any(shard.verify() for shard in filling.shards)
    print("finished", flush=True)


if __name__ == "__main__":
    main()
