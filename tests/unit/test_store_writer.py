"""Writing in place: any order, any writers, the same shard; what is not durable is not claimed."""

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.store import codec, writer
from eyas.store.codec import FP8
from eyas.store.layout import Layout, supervised
from eyas.store.sample import place, to_columns
from eyas.store.writer import ShardWriter, partial, write
from test_store_shard import same, sample

SAMPLES = [sample(f"s{i}", 3 + 5 * i % 11, hidden=8, dtype=torch.bfloat16) for i in range(6)]


def layout(dtype: torch.dtype = torch.bfloat16) -> Layout:
    return Layout([place(one, complete=False) for one in SAMPLES], 8, dtype)


@settings(max_examples=40, deadline=None)
@given(data=st.data(), dtype=st.sampled_from([torch.float32, torch.bfloat16, FP8]))
def test_any_interleaving_gives_the_same_bytes(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, dtype: torch.dtype
) -> None:
    """Two writers, samples in any order and some twice, commits and reopenings between them, some that never come."""
    folder = tmp_path_factory.mktemp("shard")
    come = data.draw(st.sets(st.integers(0, 5), min_size=1))
    order = [*data.draw(st.permutations(sorted(come))), *data.draw(st.lists(st.sampled_from(sorted(come)), max_size=3))]
    writers = [ShardWriter.create(folder / "a.safetensors", layout(dtype))]
    writers.append(ShardWriter.reopen(folder / "a.safetensors"))
    for number in order:
        turn = data.draw(st.integers(0, 1))
        writers[turn].put(SAMPLES[number])
        if data.draw(st.booleans()):
            writers[turn].commit()
            if data.draw(st.booleans()):
                writers[turn].close()
                writers[turn] = ShardWriter.reopen(folder / "a.safetensors")
                assert writers[turn].done >= set()
    writers[1].commit()
    writers[1].close()
    made = writers[0].finish()
    assert made is not None
    assert made.verify() == []
    assert made.keys == [f"s{i}" for i in sorted(come)]
    plain = ShardWriter.create(folder / "b.safetensors", layout(dtype))
    for number in sorted(come):
        plain.put(SAMPLES[number])
    other = plain.finish()
    assert other is not None
    assert (folder / "a.safetensors").read_bytes() == (folder / "b.safetensors").read_bytes()
    assert made.digest == other.digest


def test_last_states_are_kept_where_they_are_supervised(tmp_path: Path) -> None:
    shard = write(tmp_path / "a.safetensors", SAMPLES, complete=False)
    for i, one in enumerate(SAMPLES):
        found, kept = shard.sample(i), supervised(one.answer)
        assert same(replace(found, last=one.last), one)
        assert torch.equal(found.last[kept], one.last[kept])
        assert bool(found.last[~kept].isnan().all())
    assert not shard.complete
    assert write(tmp_path / "b.safetensors", SAMPLES).complete


def test_fp8_is_half_the_bytes_and_keeps_choices(tmp_path: Path) -> None:
    many = [sample(f"s{i}", 300, hidden=512, dtype=torch.bfloat16) for i in range(2)]
    whole, coded = write(tmp_path / "a.safetensors", many), write(tmp_path / "b.safetensors", many, dtype=FP8)
    assert coded.bytes < 0.51 * whole.bytes
    for i, one in enumerate(many):
        found = coded.sample(i)
        assert torch.equal(found.argmax, one.argmax)
        for mine, right in zip([*found.aux.chunk(3, 1), found.last], [*one.aux.chunk(3, 1), one.last], strict=True):
            assert float((mine.float() - right.float()).norm() / right.float().norm()) < 0.03


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(0, 5),
    layers=st.integers(1, 3),
    width=st.integers(1, 9),
    exponent=st.integers(-30, 30),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 99),
)
def test_codec_rounds_to_the_nearest(
    rows: int, layers: int, width: int, exponent: int, dtype: torch.dtype, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn(rows, layers * width, generator=generator)
    states *= torch.exp2(torch.randint(-9, 1, states.shape, generator=generator) + exponent)  # spread over magnitudes
    states = states.to(dtype)
    codes, scale = codec.encode(states, layers)
    assert (codes.shape, codes.dtype, scale.shape) == (states.shape, FP8, (rows, layers))
    assert torch.equal(scale.log2(), scale.log2().round())
    back = codec.decode(codes, scale, torch.float32).view(rows, layers, width)
    wide = states.bfloat16().float().view(rows, layers, width)
    largest = wide.abs().amax(-1, keepdim=True)
    assert bool(((back - wide).abs() <= torch.maximum(wide.abs() / 16, largest * 2**-17)).all())
    if rows:
        assert bool((wide.abs().amax(-1) / scale <= 448).all())
        assert bool((wide.abs().amax(-1) / scale > 208).all() or (largest == 0).any())


def test_zeros_stay_zeros() -> None:
    codes, scale = codec.encode(torch.zeros(2, 6, dtype=torch.bfloat16), 3)
    assert not codec.decode(codes, scale, torch.float32).any()
    assert bool(scale.isfinite().all())


def test_a_digest_is_written_after_its_data_is_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = ShardWriter.create(tmp_path / "a.safetensors", layout())
    acts: list[str] = []
    real_write, real_sync = os.pwrite, os.fdatasync

    def pwrite(handle: int, data: bytes, first: int) -> int:
        acts.append("digest" if first < made.layout.head else "data")
        return real_write(handle, data, first)

    def fdatasync(handle: int) -> None:
        acts.append("sync")
        real_sync(handle)

    monkeypatch.setattr(os, "pwrite", pwrite)
    monkeypatch.setattr(os, "fdatasync", fdatasync)
    for one in SAMPLES[:3]:
        made.put(one)
    assert made.done == set()
    made.commit()
    first = acts.index("digest")
    assert acts[first - 1] == "sync"
    assert "data" not in acts[first:]
    assert made.done == {"s0", "s1", "s2"}


def test_a_torn_sample_is_asked_for_again(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    made = ShardWriter.create(path, layout())
    made.put_columns("s1", {**to_columns(SAMPLES[1], made.layout.places[1], torch.bfloat16)})
    made.put(SAMPLES[2])
    made.commit()
    made.close()
    first, _ = made.layout.span("aux", 1)
    content = bytearray(partial(path).read_bytes())
    content[first + 5] ^= 4
    partial(path).write_bytes(content)
    again = ShardWriter.reopen(path)
    assert again.done == {"s2"}
    shard = again.finish()
    assert shard is not None
    assert (shard.keys, shard.verify()) == (["s2"], [])


def test_nothing_came(tmp_path: Path) -> None:
    assert ShardWriter.create(tmp_path / "a.safetensors", layout()).finish() is None
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_known_before_the_first_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int, first: int, count: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space"):
        ShardWriter.create(tmp_path / "a.safetensors", layout())
    assert not list(tmp_path.iterdir())


def test_a_writer_needs_the_memory_of_a_sample(tmp_path: Path) -> None:
    """64 MB through it; what it holds of its own is a block of the codec and what is being written."""
    one = sample("s0", 500, hidden=1024, dtype=torch.bfloat16)
    layout = Layout([place(replace(one, key=f"s{i}")) for i in range(32)], 1024, FP8)
    made = ShardWriter.create(tmp_path / "a.safetensors", layout)

    def anonymous() -> int:
        line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
        return int(line.split()[1]) << 10

    made.put(one)
    before = anonymous()
    for i in range(1, 32):
        made.put(replace(one, key=f"s{i}"))
    assert anonymous() - before < 12 << 20
    assert writer.PIECE <= 8 << 20
    shard = made.finish()
    assert shard is not None
    assert shard.bytes > 64 << 19
