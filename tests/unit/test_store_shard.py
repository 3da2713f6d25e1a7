"""Shards: whole or absent, read as they were written, and every damage is found."""

import json
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from eyas.errors import UserError
from eyas.store.sample import Sample
from eyas.store.shard import Shard
from eyas.store.writer import write

TENSORS = ("offsets", "last_offsets", "digests", "input_ids", "argmax", "aux", "last", "loss_mask")


def sample(key: str, tokens: int, hidden: int = 4, dtype: torch.dtype = torch.float32) -> Sample:
    random = torch.Generator().manual_seed(tokens)
    return Sample(
        key=key,
        ids=torch.randint(0, 2**31 - 1, (tokens,), generator=random),
        answer=torch.rand(tokens, generator=random) < 0.5,
        aux=torch.randn(tokens, 3 * hidden, generator=random).to(dtype),
        last=torch.randn(tokens, hidden, generator=random).to(dtype),
        argmax=torch.randint(-1, 2**31 - 1, (tokens,), generator=random),
    )


def same(one: Sample, other: Sample) -> bool:
    names = ("ids", "answer", "aux", "last", "argmax")
    pairs = [(getattr(one, name), getattr(other, name)) for name in names]
    return one.key == other.key and all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    path = tmp_path / "a.safetensors"
    write(path, [sample("a", 3), sample("b", 1), sample("c", 5)])
    return path


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    hidden=st.integers(1, 9),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    key=st.text(max_size=8),
)
def test_round_trip(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], hidden: int, dtype: torch.dtype, key: str
) -> None:
    samples = [sample(f"{key}{i}", length, hidden, dtype) for i, length in enumerate(lengths)]
    path = tmp_path_factory.mktemp("shard") / "x.safetensors"
    write(path, samples)
    shard = Shard(path)
    assert shard.keys == [one.key for one in samples]
    assert shard.lengths == lengths
    assert len(shard) == len(lengths)
    assert all(same(shard.sample(i), one) for i, one in reversed(list(enumerate(samples))))
    assert shard.supervised == sum(int(one.answer.sum()) for one in samples)
    assert shard.verify() == []
    assert [file.name for file in path.parent.iterdir()] == ["x.safetensors"]


def test_any_safetensors_reader_can_read_it(shard: Path) -> None:
    tensors = load_file(shard)
    assert tensors.keys() == set(TENSORS)
    assert tensors["offsets"].tolist() == [0, 3, 4, 9]
    assert torch.equal(tensors["aux"][3:4], sample("b", 1).aux)


def test_states_that_are_views_or_not_contiguous_are_written_right(tmp_path: Path) -> None:
    one = sample("a", 4, hidden=2)
    wide = torch.zeros(4, 20)
    wide[:, :6] = one.aux
    path = tmp_path / "a.safetensors"
    write(path, [Sample("a", one.ids, one.answer, wide[:, :6], one.last.T.contiguous().T, one.argmax)])
    assert same(Shard(path).sample(0), one)


def test_out_of_range(shard: Path) -> None:
    for index in (-1, 3):
        with pytest.raises(IndexError):
            Shard(shard).sample(index)


def test_what_does_not_agree_is_refused(tmp_path: Path) -> None:
    good = sample("a", 3)
    short = Sample("b", good.ids, good.answer, good.aux[:-1], good.last, good.argmax)
    negative = Sample("b", good.ids - 2**31, good.answer, good.aux, good.last, good.argmax)
    for bad in ([], [good, good], [short], [negative], [good, sample("b", 3, hidden=5)], [sample("a", 0)]):
        with pytest.raises(AssertionError):
            write(tmp_path / "x.safetensors", bad)
    with pytest.raises(AssertionError):
        write(tmp_path / "x.safetensors", [good, sample("b", 3, dtype=torch.bfloat16)])
    assert not list(tmp_path.iterdir())


def test_a_file_cut_anywhere_is_refused_by_name(shard: Path) -> None:
    whole = shard.read_bytes()
    for length in [*range(0, len(whole), 7), len(whole) - 1, len(whole) + 1]:
        shard.write_bytes((whole + b"\0")[:length])
        with pytest.raises(UserError, match=r"a\.safetensors"):
            Shard(shard)


def test_foreign_files_are_refused(tmp_path: Path) -> None:
    def pack(header: object) -> bytes:
        text = json.dumps(header).encode()
        return len(text).to_bytes(8, "little") + text

    whole = {"format": "eyas-shard-2", "keys": "[]", "digests": "[]"}
    for content in (
        b"hello, I am no shard",
        bytes(100),
        b"\xff" * 100,
        pack([]),
        pack({}),
        pack({"__metadata__": {"format": "pt"}}),
        pack({"__metadata__": {"format": "eyas-shard-3"}}),
        pack({"__metadata__": {"format": "eyas-shard-2"}}),
        pack({"__metadata__": whole}),
        pack({"__metadata__": {**whole, "keys": "7"}}),
        pack({"__metadata__": whole, "input_ids": {"shape": [0]}, "last": {"shape": [0, 4], "dtype": "F32"}}),
        pack({"__metadata__": whole, "input_ids": {"shape": "x"}, "last": {"shape": [1, "y"], "dtype": "F32"}}),
    ):
        path = tmp_path / "foreign.safetensors"
        path.write_bytes(content)
        with pytest.raises(UserError, match=r"foreign\.safetensors"):
            Shard(path)
    with pytest.raises(UserError, match="nothing"):
        Shard(tmp_path / "nothing.safetensors")


def start_of(content: bytes, name: str) -> tuple[int, int]:
    """Where a tensor's bytes lie in a shard."""
    length = int.from_bytes(content[:8], "little")
    start, end = json.loads(content[8 : 8 + length])[name]["data_offsets"]
    return 8 + length + start, 8 + length + end


def test_any_flipped_byte_is_found(shard: Path) -> None:
    """In the header and the offsets the shard may be refused as a whole, behind them the sample is named."""
    whole = shard.read_bytes()
    first, _ = start_of(whole, "input_ids")
    for place in range(len(whole)):
        changed = bytearray(whole)
        changed[place] ^= 1 << place % 8
        shard.write_bytes(changed)
        try:
            damaged = Shard(shard).verify()
        except UserError:
            assert place < first
        else:
            assert damaged, place
            assert len(damaged) == 1 or place < first


@pytest.mark.parametrize("name", TENSORS[3:])
def test_a_flipped_byte_names_the_sample(shard: Path, name: str) -> None:
    whole = bytearray(shard.read_bytes())
    start, end = start_of(whole, name)
    whole[start + 3 * (end - start) // 9] ^= 1
    shard.write_bytes(whole)
    assert Shard(shard).verify() == ["b"]


def test_a_sample_is_read_without_the_rest(tmp_path: Path) -> None:
    """48 MB in the file; memory grows by the sample only."""
    path = tmp_path / "a.safetensors"
    write(path, [sample(f"{i}", 1000 + i, hidden=256) for i in range(12)])

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = resident()
    shard = Shard(path)
    assert shard.sample(7).aux.sum() != 0
    assert resident() - before < 16 << 20


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        write(tmp_path / "a.safetensors", [sample("a", 3)])
    assert not list(tmp_path.iterdir())
