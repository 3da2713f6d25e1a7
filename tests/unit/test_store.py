"""The store: a folder with a manifest, or no store."""

import contextlib
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from eyas.capture.contract import Contract
from eyas.digests import digest_json
from eyas.errors import UserError
from eyas.store.manifest import Quarantined
from eyas.store.sample import Sample
from eyas.store.store import OPENED, FeatureStore, create
from eyas.store.writer import write

CONTRACT = Contract(1, "m", "t", "c", (2, 15, 27), True, "float32", 4, 100, "inprocess", "5.0", {})

PARTS = ("ids", "answer", "aux", "last", "argmax")


def sample(key: str, tokens: int) -> Sample:
    random = torch.Generator().manual_seed(tokens)
    answer = torch.arange(tokens) >= tokens // 2
    states = torch.randn(tokens, 16, generator=random)
    ids = torch.randint(0, 100, (tokens,), generator=random)
    return Sample(key, ids, answer, states[:, :12], states[:, 12:], ids)


@pytest.fixture
def pieces(tmp_path: Path) -> list[Path]:
    folder = tmp_path / "pieces"
    folder.mkdir()
    paths = [folder / name for name in ("z.safetensors", "a.safetensors")]
    write(paths[0], [sample("s1", 3), sample("s2", 1)])
    write(paths[1], [sample("s3", 7)])
    return paths


@pytest.fixture
def folder(tmp_path: Path, pieces: list[Path]) -> Path:
    create(tmp_path / "store", CONTRACT, pieces, [Quarantined("bad", "rows: one short")])
    return tmp_path / "store"


def test_samples_in_the_order_given(folder: Path) -> None:
    store = FeatureStore.open(folder, CONTRACT)
    assert len(store) == 3
    assert store.keys == ["s1", "s2", "s3"]
    assert store.lengths == [3, 1, 7]
    assert (store.tokens, store.supervised) == (11, 2 + 1 + 4)
    assert store.quarantined == [Quarantined("bad", "rows: one short")]
    assert store.contract == CONTRACT
    for index, wanted in ((2, sample("s3", 7)), (0, sample("s1", 3)), (1, sample("s2", 1))):
        found = store.sample(index)
        assert found.key == wanted.key
        assert torch.equal(found.aux, wanted.aux)
        assert torch.equal(found.argmax, wanted.argmax)
        assert all(map(torch.equal, store.ids(index), (wanted.ids, wanted.answer)))
    for index in (-1, 3):
        with pytest.raises(IndexError):
            store.sample(index)
    assert store.verify() == []


def test_shards_enter_by_hard_link_and_outlive_their_source(folder: Path, pieces: list[Path]) -> None:
    assert (folder / "shard-00000.safetensors").samefile(pieces[0])
    for piece in pieces:
        piece.unlink()
    assert FeatureStore.open(folder).verify() == []


def test_another_file_system(tmp_path: Path, pieces: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def link(source: Path, target: Path) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", link)
    create(tmp_path / "store", CONTRACT, pieces)
    assert FeatureStore.open(tmp_path / "store").verify() == []
    assert not (tmp_path / "store" / "shard-00000.safetensors").samefile(pieces[0])


def test_opening_touches_no_shard(folder: Path) -> None:
    for shard in folder.glob("shard-*"):
        shard.unlink()
    store = FeatureStore.open(folder)
    assert store.lengths == [3, 1, 7]
    with pytest.raises(UserError, match=r"shard-00001\.safetensors.*restore it or capture again"):
        store.sample(2)


def test_no_manifest_no_store(folder: Path) -> None:
    (folder / "manifest.json").unlink()
    with pytest.raises(UserError, match=r"no feature store \(manifest\.json is missing"):
        FeatureStore.open(folder)


def test_interrupted_before_the_manifest(folder: Path, pieces: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that is made again and does not come to its end is none; the next attempt leaves nothing stale."""

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("eyas.store.manifest.write", killed)
        with pytest.raises(KeyboardInterrupt):
            create(folder, CONTRACT, pieces)
    with pytest.raises(UserError, match="no feature store"):
        FeatureStore.open(folder)
    create(folder, CONTRACT, pieces[1:])
    names = sorted(path.name for path in folder.iterdir())
    assert names[0].startswith("index-")
    assert names[1:] == ["manifest.json", "shard-00000.safetensors"]
    assert FeatureStore.open(folder).keys == ["s3"]


def test_duplicate_keys(tmp_path: Path, pieces: list[Path]) -> None:
    again = tmp_path / "again.safetensors"
    write(again, [sample("s9", 2), sample("s2", 4)])
    with pytest.raises(UserError, match=r"sample s2 is in .*z\.safetensors and again in .*again\.safetensors"):
        create(tmp_path / "store", CONTRACT, [*pieces, again])
    assert not (tmp_path / "store").exists()


def test_states_of_another_kind_than_the_contract(tmp_path: Path, pieces: list[Path]) -> None:
    for contract in (replace(CONTRACT, hidden_size=5), replace(CONTRACT, dtype="bfloat16")):
        with pytest.raises(UserError, match=r"z\.safetensors: states of width 4 in float32"):
            create(tmp_path / "store", contract, pieces)


def test_contract_mismatch_names_field_and_values(folder: Path) -> None:
    with pytest.raises(UserError, match=r"store: captured with layers \(2, 15, 27\), needed is \(3, 16, 28\): set"):
        FeatureStore.open(folder, replace(CONTRACT, layers=(3, 16, 28)))


def test_verify_names_file_and_sample(folder: Path, tmp_path: Path) -> None:
    first, second = folder / "shard-00000.safetensors", folder / "shard-00001.safetensors"
    content = bytearray(first.read_bytes())
    content[-1] ^= 1  # the mask of s2, the last row of the file
    first.write_bytes(content)
    second.write_bytes(second.read_bytes()[:-100])
    problems = FeatureStore.open(folder).verify()
    assert len(problems) == 2
    assert problems[0] == f"{first}: sample s2 is damaged"
    assert problems[1].startswith(f"{second}: not a usable shard")


def test_swapped_shards_are_noticed(folder: Path) -> None:
    first, second = folder / "shard-00000.safetensors", folder / "shard-00001.safetensors"
    second.unlink()
    second.write_bytes(first.read_bytes())
    store = FeatureStore.open(folder)
    assert store.sample(0).key == "s1"
    with pytest.raises(UserError, match=r"shard-00001\.safetensors: not the shard that manifest\.json names"):
        store.sample(2)


def signed(content: dict[str, object]) -> str:
    """A manifest whose digest is right again."""
    content.pop("digest")
    return json.dumps({**content, "digest": digest_json(content)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 3}, "store format 3, this eyas reads 2"),
        ({"contract": None}, "contract is not a mapping"),
        ({"shards": [{"file": "x"}]}, "damaged"),
        ({"shards": 7}, "damaged"),
        ({"quarantined": [{}]}, "damaged"),
    ],
)
def test_a_manifest_that_makes_no_sense(folder: Path, change: dict[str, object], message: str) -> None:
    path = folder / "manifest.json"
    path.write_text(signed({**json.loads(path.read_text()), **change}))
    with pytest.raises(UserError, match=message):
        FeatureStore.open(folder)
    path.write_text("[]")
    with pytest.raises(UserError, match="store format None"):
        FeatureStore.open(folder)


@pytest.mark.parametrize("name", ["manifest.json", "index-*.safetensors", "shard-00001.safetensors"])
def test_any_flipped_bit_of_any_file_is_found(folder: Path, name: str) -> None:
    """By `verify`, and a manifest's already when it is opened; no damaged sample is served."""
    path = next(folder.glob(name))
    whole = path.read_bytes()
    wanted = [FeatureStore.open(folder).sample(i) for i in range(3)]
    for place in range(0, len(whole), 5 if name.startswith("shard") else 1):  # test_store_shard has them all
        changed = bytearray(whole)
        changed[place] ^= 1 << place % 8
        path.write_bytes(changed)
        try:
            store = FeatureStore.open(folder)
        except UserError:
            continue
        assert name != "manifest.json", place
        assert store.verify(), place
        with contextlib.suppress(UserError):
            found = store.sample(2)
            assert found.key == "s3"
            assert all(torch.equal(getattr(found, part), getattr(wanted[2], part)) for part in PARTS), place


def test_opening_reads_no_more_with_more_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The manifest grows with the shards alone."""
    sizes = []
    for count in (1, 100):
        piece = tmp_path / f"{count}.safetensors"
        write(piece, [sample(f"{i:03}", 2) for i in range(count)])
        create(tmp_path / str(count), CONTRACT, [piece])
        sizes.append((tmp_path / str(count) / "manifest.json").stat().st_size)
    assert sizes[1] - sizes[0] < 12  # a few digits
    store = FeatureStore.open(tmp_path / "100")
    assert store.lengths == [2] * 100


def test_few_shards_stay_open(tmp_path: Path) -> None:
    pieces = [tmp_path / f"{i}.safetensors" for i in range(40)]
    for i, piece in enumerate(pieces):
        write(piece, [sample(f"s{i}", 2 + i)])
    create(tmp_path / "store", CONTRACT, pieces)
    store = FeatureStore.open(tmp_path / "store")
    before = len(list(Path("/proc/self/fd").iterdir()))
    held = [store.sample(i) for i in range(40)]
    del held
    assert len(list(Path("/proc/self/fd").iterdir())) <= before + 2 * OPENED
    assert store.sample(0).key == "s0"
