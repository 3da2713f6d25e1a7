"""Shards that fill up: planned by size, filled from threads, resumed, finished with or without stragglers."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fulldisk
from eyas.store.filling import Filling
from eyas.store.sample import Sample, place
from eyas.store.shard import Shard
from test_store_shard import same, sample

SAMPLES = [sample(f"s{i}", 2 + 3 * i % 7, hidden=8, dtype=torch.bfloat16) for i in range(12)]
BYTES = 3 * 5 * 4 * 8 * 2
"""About three samples to a shard."""


def start(folder: Path, samples: list[Sample] = SAMPLES) -> Filling:
    filling = Filling(folder, "x", 8, torch.bfloat16)
    filling.resume({one.key for one in SAMPLES}.__contains__)
    filling.plan([place(one) for one in samples if one.key not in filling.kept], BYTES, 4)
    return filling


def logical(filling: Filling) -> dict[str, Sample]:
    found = [shard.sample(i) for shard in filling.shards for i in range(len(shard))]
    assert len({one.key for one in found}) == len(found)
    return {one.key: one for one in found}


def test_from_threads_in_any_order(tmp_path: Path) -> None:
    filling = start(tmp_path)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda one: filling.put([one]), SAMPLES[::-1]))
    assert not list(tmp_path.glob("*.partial"))  # each was finished as soon as it was full
    assert len(filling.shards) > 3
    found = logical(filling)
    assert list(found) == [one.key for one in SAMPLES]
    assert all(same(found[one.key], one) for one in SAMPLES)


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_any_order_of_arrivals_stops_and_failures_gives_the_same_store(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """What never comes is settled or left; stopped and resumed in between, every other sample is there once."""
    folder = tmp_path_factory.mktemp("filling")
    order = data.draw(st.permutations(SAMPLES))
    failing = {one.key for one in data.draw(st.lists(st.sampled_from(SAMPLES), max_size=3))}
    filling = start(folder)
    for one in order:
        if one.key in failing:
            filling.settle(one.key)
        else:
            filling.put([one])
        if data.draw(st.integers(0, 4)) == 0:
            filling.close()
            filling = start(folder)
            for key in failing:
                filling.settle(key)
    filling.finish()
    found = logical(filling)
    assert found.keys() == {one.key for one in SAMPLES} - failing
    assert all(same(found[one.key], one) for one in SAMPLES if one.key not in failing)
    assert not list(folder.glob("*.partial"))
    again = Filling(folder, "x", 8, torch.bfloat16)
    again.resume(found.__contains__)
    assert again.kept == found.keys()


def test_what_is_wanted_no_longer_or_damaged_is_not_resumed(tmp_path: Path) -> None:
    filling = start(tmp_path)
    for one in SAMPLES[:5]:
        filling.put([one])
    filling.close()
    finished, unfinished = sorted(tmp_path.glob("*.safetensors")), sorted(tmp_path.glob("*.partial"))
    assert finished
    assert unfinished
    lost = {*Shard(finished[0]).keys, *Shard(unfinished[0]).keys}
    unfinished[0].write_bytes(unfinished[0].read_bytes()[:-1])
    content = bytearray(finished[0].read_bytes())
    content[-1] ^= 1
    finished[0].write_bytes(content)
    assert lost
    assert start(tmp_path).kept == {one.key for one in SAMPLES[:5]} - lost
    stranger = Filling(tmp_path, "x", 8, torch.bfloat16)
    stranger.resume(lambda key: False)
    assert stranger.kept == set()
    assert not list(tmp_path.iterdir())


def test_a_full_disk_stops_and_goes_on(tmp_path: Path) -> None:
    """On a real file system of 2 MB that is enlarged later."""
    alone = ["unshare", "--user", "--map-root-user", "--mount"]
    if subprocess.run([*alone, "true"], capture_output=True).returncode:
        pytest.skip("no user namespaces here")
    paths = os.pathsep.join(path for path in sys.path if path)
    command = [*alone, sys.executable, fulldisk.__file__, str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": paths})
    assert ran.returncode == 0, ran.stderr
    said = ran.stdout.splitlines()
    assert said[0] == "left 100"
    assert said[1].startswith("stopped disk full while writing")
    assert said[1].endswith("run the same command again; what is finished is kept")
    names = said[2].split()[1:]
    assert len(names) == 3
    assert all(name.startswith("x-") for name in names)  # nothing half-made lies about
    assert 0 < int(said[3].split()[1]) < 50
    assert said[4] == "finished"
