"""The data set of a training run: what every step and every rank sees, and that it goes on where it stopped."""

import threading
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from eyas.capture.contract import Contract
from eyas.errors import UserError
from eyas.store.codec import FP8
from eyas.store.store import FeatureStore, create
from eyas.store.writer import write
from eyas.train.data import Steps, to_batch
from eyas.train.loader import Loader
from eyas.train.packing import pack, plan
from eyas.train.parallel import World
from test_store_shard import sample

CPU = torch.device("cpu")
SAMPLES = [sample(f"s{i}", 4 + 7 * i % 13, hidden=8, dtype=torch.bfloat16) for i in range(14)]


def make(folder: Path, dtype: torch.dtype = torch.bfloat16, complete: tuple[bool, bool] = (True, True)) -> FeatureStore:
    paths = [folder / "a.safetensors", folder / "b.safetensors"]
    for path, part, whole in zip(paths, (SAMPLES[:9], SAMPLES[9:]), complete, strict=True):
        write(path, part, dtype, complete=whole)
    name = str(dtype).removeprefix("torch.")
    create(folder / "store", Contract(1, "m", "t", "c", (1, 2, 3), True, name, 8, 9, "e", "1", {}), paths)
    return FeatureStore.open(folder / "store")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FP8])
@pytest.mark.parametrize("complete", [(True, True), (False, False), (True, False)])
def test_batches_are_those_of_the_decoded_samples(
    tmp_path: Path, dtype: torch.dtype, complete: tuple[bool, bool]
) -> None:
    store = make(tmp_path, dtype, complete)
    steps = plan(store.lengths, 40, 1, seed=3)
    for (rows,), samples in zip(Steps(store, steps), steps, strict=True):
        batch = to_batch(rows, 3, CPU, torch.float32)
        right = pack([store.sample(i) for i in samples], 3, CPU, torch.float32)
        assert rows.keys == [f"s{i}" for i in samples]
        for name in ("slots", "depth", "seen", "next_ids", "counts", "label"):
            assert torch.equal(getattr(batch.chains, name), getattr(right.chains, name))
        assert torch.equal(batch.argmax, right.argmax)
        assert torch.equal(batch.aux, right.aux)
        assert torch.equal(batch.last, right.last)
        assert batch.last.dtype == torch.float32


def test_states_stay_coded_until_they_are_on_the_device(tmp_path: Path) -> None:
    (rows,) = next(iter(Steps(make(tmp_path, FP8), [[0, 1]])))
    assert rows.columns["aux"].dtype == rows.columns["last"].dtype == FP8


def test_a_resumed_run_sees_what_an_undisturbed_one_sees(tmp_path: Path) -> None:
    store = make(tmp_path)
    steps = plan(store.lengths, 40, 2.5, seed=3)
    whole = [(rows.step, rows.keys) for (rows,) in Steps(store, steps)]
    for first in range(len(steps)):
        again = Steps(FeatureStore.open(store.folder), steps, first)
        assert len(again) == len(steps) - first
        assert [(rows.step, rows.keys) for (rows,) in Loader(again.read, range(first, len(steps)), CPU)] == whole[
            first:
        ]


def test_every_rank_takes_every_step_even_without_samples(tmp_path: Path) -> None:
    store = make(tmp_path)
    ranks = [list(Steps(store, [[3, 4, 5], [7]], world=World(rank, 3))) for rank in range(3)]
    assert [[len(rows.keys) for (rows,) in steps] for steps in ranks] == [[1, 1], [1, 0], [1, 0]]
    empty = to_batch(ranks[2][1][0], 3, CPU, torch.float32)
    assert (empty.aux.shape, empty.last.shape) == ((0, 24), (0, 8))
    assert len(empty.chains) == 0


def test_a_step_that_is_too_large_comes_in_parts(tmp_path: Path) -> None:
    store = make(tmp_path)
    (parts,) = Steps(store, [list(range(14))], part_tokens=30)
    assert [key for rows in parts for key in rows.keys] == [f"s{i}" for i in range(14)]
    assert len(parts) > 1
    assert all(len(rows.columns["input_ids"]) <= 30 for rows in parts)


def test_a_data_loader_takes_it(tmp_path: Path) -> None:
    store = make(tmp_path)
    loader = DataLoader(Steps(store, [[1], [2, 0]]), batch_size=None)
    assert [rows.keys for (rows,) in loader] == [["s1"], ["s2", "s0"]]


def test_reading_ahead_is_bounded_and_stops() -> None:
    taken: list[int] = []

    def read(number: int) -> int:
        taken.append(number)
        return number

    reader = iter(Loader(read, range(1, 100), CPU, ahead=3))
    assert next(reader) == 1
    assert next(reader) == 2
    reader.close()
    assert taken[-1] <= 2 + 3
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("loader")]


def test_a_damaged_sample_is_not_trained_on(tmp_path: Path) -> None:
    folder = make(tmp_path).folder
    path = folder / "shard-00000.safetensors"
    content = bytearray(path.read_bytes())
    content[-3] ^= 1  # the mask of the ninth sample
    path.write_bytes(content)
    reader = iter(Loader(Steps(FeatureStore.open(folder), [[0], [8]]).read, [0, 1], CPU))
    assert next(reader)[0].keys == ["s0"]
    with pytest.raises(UserError, match="sample s8 is damaged"):
        next(reader)


def test_a_reader_keeps_no_pages(tmp_path: Path) -> None:
    """64 MB pass through; mapped pages of the file are given back after each step."""
    wide = [sample(f"w{i}", 500, hidden=1024, dtype=torch.bfloat16) for i in range(16)]
    write(tmp_path / "w.safetensors", wide)
    create(
        tmp_path / "wide",
        Contract(1, "m", "t", "c", (1, 2, 3), True, "bfloat16", 1024, 9, "e", "1", {}),
        [tmp_path / "w.safetensors"],
    )
    del wide

    def mapped() -> int:
        line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssFile"))
        return int(line.split()[1]) << 10

    store = FeatureStore.open(tmp_path / "wide")
    before = mapped()
    most = 0
    for _ in Steps(store, [[i] for i in range(16)]):
        most = max(most, mapped() - before)
    assert most < 16 << 20
