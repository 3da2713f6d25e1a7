"""kill -9 at any moment of writing and merging: nothing is lost, nothing doubled, no torn sample served."""

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import storefuzz
from eyas.store.sample import Sample
from eyas.store.shard import Shard
from eyas.store.store import FeatureStore
from eyas.store.writer import ShardWriter, partial

EXPECTED = {one.key: one for shard in range(storefuzz.SHARDS) for one in storefuzz.samples(shard)[1:]}


class Attempts:
    """Children that write a store; see storefuzz."""

    def __init__(self) -> None:
        paths = os.pathsep.join(path for path in sys.path if path)
        command = [sys.executable, storefuzz.__file__]
        self._server = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": paths}
        )

    def run(self, folder: Path, seed: int, after: float | None) -> list[str]:
        """One attempt, killed after some seconds; returns what it said."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(f"{seed} {folder}\n")
        self._server.stdin.flush()
        pid = int(self._server.stdout.readline())
        if after is not None:
            time.sleep(after)
            os.kill(pid, signal.SIGKILL)
        self._server.stdin.write("\n")
        self._server.stdin.flush()
        said: list[str] = []
        while (line := self._server.stdout.readline().strip()) != "gone":
            said.append(line)
        return said

    def end(self) -> None:
        self._server.communicate()


@pytest.fixture(scope="module")
def attempts() -> Iterator[Attempts]:
    made = Attempts()
    yield made
    made.end()


def equal(one: Sample, other: Sample) -> bool:
    last = one.last[~one.last.isnan().any(1)]
    kept = other.last[:-1][other.answer[1:]]
    return torch.equal(one.ids, other.ids) and torch.equal(one.aux, other.aux) and torch.equal(last, kept)


def examine(folder: Path) -> set[str]:
    """Keys of what a later attempt finds whole; what is served is right, and in one place."""
    found: list[str] = []
    for number in range(storefuzz.SHARDS):
        path = folder / f"{number}.safetensors"
        if path.exists():
            assert not partial(path).exists()
            shard = Shard(path)
            assert shard.verify() == []
            assert len(shard) == storefuzz.SAMPLES - 1
            done = set(shard.keys)
        elif partial(path).exists():
            writer = ShardWriter.reopen(path)
            writer.close()
            shard, done = Shard(partial(path)), writer.done
        else:
            continue
        for i, key in enumerate(shard.keys):
            assert key not in done or equal(shard.sample(i), EXPECTED[key])
        found += done
    assert len(set(found)) == len(found)
    for name in ("a", "b", "merged"):
        if (folder / name / "manifest.json").exists():
            assert FeatureStore.open(folder / name).verify() == []
    if (folder / "merged").exists():
        assert FeatureStore.open(folder / "merged").keys == list(EXPECTED)
    return set(found)


def fuzz(attempts: Attempts, root: Path, kills: int) -> None:
    chance = random.Random(kills)
    seconds = 1.0
    for name in ("once", "twice"):
        (root / name).mkdir()
        began = time.monotonic()
        assert attempts.run(root / name, 0, None)[-1] == "finished"
        seconds = min(seconds, time.monotonic() - began)
        assert examine(root / name) == EXPECTED.keys()
    rounds = 0
    while kills:
        folder, durable, rounds = root / str(rounds), set(), rounds + 1
        folder.mkdir()
        while True:
            said = attempts.run(folder, kills, chance.uniform(0, seconds) if kills else None)
            if said[-1:] == ["finished"]:
                break
            kills -= 1
            durable |= {key for line in said for key in line.split()}
            assert durable <= examine(folder)
        assert examine(folder) == EXPECTED.keys()
    assert rounds > 1


@pytest.fixture
def root() -> Iterator[Path]:
    """In memory: what a killed process has written stays, whether it is on the disk yet or not."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


def test_killed_and_resumed(attempts: Attempts, root: Path) -> None:
    fuzz(attempts, root, 12)


@pytest.mark.long
def test_killed_and_resumed_two_hundred_times(attempts: Attempts, root: Path) -> None:
    fuzz(attempts, root, 200)
