"""Examining, repairing, merging and removing stores, as functions and as commands; how long a run's states are kept."""

import json
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from typer.testing import CliRunner

from eyas.cli import app
from eyas.errors import UserError
from eyas.progress import Silent
from eyas.run import retention
from eyas.run.folder import RunFolder
from eyas.store import tend
from eyas.store.codec import FP8
from eyas.store.store import FeatureStore, create
from eyas.store.writer import write
from eyas.ui.overview import as_text, read_status
from test_store import CONTRACT, sample

NUMBERS = range(1, 8)


def make(folder: Path, *parts: list[int]) -> Path:
    """A store with a shard for each part."""
    pieces = folder.parent / f"{folder.name}-pieces"
    pieces.mkdir(parents=True)
    paths = [pieces / f"{i}.safetensors" for i in range(len(parts))]
    for path, part in zip(paths, parts, strict=True):
        write(path, [sample(f"s{number}", number) for number in part])
    create(folder, CONTRACT, paths)
    return folder


def spoil(path: Path, place: int) -> None:
    """Flip a bit; the file is replaced, so that what shares it by hard link stays."""
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.unlink()
    path.write_bytes(content)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return make(tmp_path / "store", [1, 2, 3], [4], [5, 6, 7])


def test_repair_takes_out_what_is_damaged_and_nothing_else(store: Path) -> None:
    spoil(store / "shard-00000.safetensors", -1)  # the mask of s3
    content = (store / "shard-00001.safetensors").read_bytes()
    (store / "shard-00001.safetensors").write_bytes(content[:-5])
    assert tend.repair(store, Silent()) == {"damaged": ["s3"], "lost": 1, "kept": 5}
    repaired = FeatureStore.open(store)
    assert repaired.verify() == []
    assert repaired.keys == ["s1", "s2", "s5", "s6", "s7"]
    assert [(one.key, one.reason) for one in repaired.quarantined] == [("s3", "damaged: found by repair")]
    assert torch.equal(repaired.sample(2).aux, sample("s5", 5).aux)
    assert len(list(store.glob("shard-*"))) == 2
    assert len(list(store.glob("index-*"))) == 1
    assert tend.repair(store, Silent()) == {"damaged": [], "lost": 0, "kept": 5}


def test_repair_of_a_digest_in_a_head(store: Path) -> None:
    """The shard is no longer the one of the manifest; its other samples are."""
    path = store / "shard-00002.safetensors"
    shard = FeatureStore.open(store).shard(2)
    spoil(path, shard.layout.digest_at(1))
    assert FeatureStore.open(store).verify() != []
    assert tend.repair(store, Silent())["damaged"] == ["s6"]
    assert FeatureStore.open(store).keys == ["s1", "s2", "s3", "s4", "s5", "s7"]


def test_repair_stopped_before_its_manifest_changes_nothing(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(store / "shard-00000.safetensors", -1)
    before = (store / "manifest.json").read_bytes()

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("eyas.store.manifest.write", killed)
        with pytest.raises(KeyboardInterrupt):
            tend.repair(store, Silent())
    assert (store / "manifest.json").read_bytes() == before
    assert FeatureStore.open(store).sample(0).key == "s1"
    assert tend.repair(store, Silent())["kept"] == 6


def test_nothing_is_whole(tmp_path: Path) -> None:
    store = make(tmp_path / "store", [3])
    spoil(store / "shard-00000.safetensors", -1)
    with pytest.raises(UserError, match="no sample is whole"):
        tend.repair(store, Silent())


def test_merge_takes_every_sample_once(store: Path, tmp_path: Path) -> None:
    other = make(tmp_path / "other", [6, 2], [9], [4])
    found = tend.merge(tmp_path / "merged", [store, other], Silent())
    assert found == {"samples": 8, "duplicates": 3}
    merged = FeatureStore.open(tmp_path / "merged")
    assert merged.keys == ["s1", "s2", "s3", "s4", "s5", "s6", "s7", "s9"]
    assert merged.verify() == []
    assert (tmp_path / "merged" / "shard-00000.safetensors").samefile(store / "shard-00000.safetensors")
    assert not list(tmp_path.glob(".merged*"))
    with pytest.raises(UserError, match="is there already"):
        tend.merge(tmp_path / "merged", [store], Silent())


def test_merge_refuses_another_contract_and_damage(store: Path, tmp_path: Path) -> None:
    piece = tmp_path / "piece.safetensors"
    write(piece, [sample("s9", 9)])
    create(tmp_path / "layers", replace(CONTRACT, layers=(3, 16, 28)), [piece])
    write(piece, [sample("s9", 9)], dtype=FP8)
    create(tmp_path / "fp8", replace(CONTRACT, dtype="float8_e4m3fn"), [piece])
    with pytest.raises(UserError, match=r"layers: captured with layers \(3, 16, 28\)"):
        tend.merge(tmp_path / "merged", [store, tmp_path / "layers"], Silent())
    with pytest.raises(UserError, match="fp8: states in float8_e4m3fn, those before in float32"):
        tend.merge(tmp_path / "merged", [store, tmp_path / "fp8"], Silent())
    spoil(store / "shard-00000.safetensors", -1)
    with pytest.raises(UserError, match="sample s3 is damaged: `eyas store repair"):
        tend.merge(tmp_path / "merged", [store], Silent())
    assert not (tmp_path / "merged").exists()


def run(*arguments: object) -> str:
    found = CliRunner().invoke(app, ["store", *map(str, arguments)])
    assert found.exception is None or isinstance(found.exception, SystemExit), found.exception
    return f"{found.exit_code}\n{found.output}"


def test_commands(store: Path, tmp_path: Path) -> None:
    assert run("verify", store) == "0\nall samples are whole\n"
    assert "shard-00002.safetensors        3 samples" in run("ls", tmp_path)
    rows = json.loads(run("ls", store, "--samples", "--json").partition("\n")[2])[str(store)]
    assert [row["key"] for row in rows] == [f"s{number}" for number in NUMBERS]
    assert rows[3]["digest"] == FeatureStore.open(store).shard(1).sample_digest(0)
    figures = json.loads(run("stats", store, "--json").partition("\n")[2])[str(store)]
    assert (figures["samples"], figures["tokens"], figures["lengths"]["median"]) == (7, 28, 4)
    assert "7 samples, 28 tokens" in run("stats", store)
    assert "8 samples, 1 duplicates" in run("merge", tmp_path / "m", store, make(tmp_path / "other", [4, 8]))
    spoil(store / "shard-00000.safetensors", -1)
    assert run("verify", store).startswith("1\n")
    assert "6 samples kept, 1 damaged, 0 lost with their shards\ns3\n" in run("repair", store)
    assert run("rm", store).startswith("0\n")
    assert not store.exists()
    assert (tmp_path / "m" / "manifest.json").exists()
    with pytest.raises(UserError, match="no feature store here or below"):
        tend.find(tmp_path / "other-pieces")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A finished run whose capture and answers share their states, as in-process."""
    run = tmp_path / "runs" / "one"
    out = run / "steps" / "capture" / "d1" / "out"
    pieces = make(out / "train", [1, 2, 3]).parent / "train-pieces"
    (out / "result.json").write_text("{}")
    (out / "outputs.json").write_text("{}")
    batches = run / "steps" / "answers" / "d0" / "out" / "batches"
    batches.parent.mkdir(parents=True)
    pieces.rename(batches)
    (run / "plan.json").write_text(json.dumps({"steps": [{"name": "capture", "digest": "d1"}]}))
    (run / "verdict.json").write_text(json.dumps({"accept_length": {}}))
    (run / "run.yaml").write_text(yaml.safe_dump({"store": {"keep": 3}}))
    return run


def test_sizes_in_status_count_what_is_shared_once(folder: Path) -> None:
    sizes = retention.taken(folder)
    assert sizes.keys() == {"answers", "capture"}  # of the latter, the index
    assert sizes["answers"] >= sum(path.stat().st_size for path in folder.rglob("batches/*"))
    assert "states on disk: " in as_text(read_status(folder))


def test_rm_of_a_folder_of_runs_is_refused(folder: Path) -> None:
    before = sorted(folder.rglob("*"))
    result = CliRunner().invoke(app, ["store", "rm", str(folder.parent)])
    assert isinstance(result.exception, UserError)
    assert "holds runs" in str(result.exception)
    assert sorted(folder.rglob("*")) == before


def test_rm_of_a_run_frees_all_and_leaves_its_figures(folder: Path) -> None:
    assert run("rm", folder).startswith("0\n")
    assert not list(folder.rglob("*.safetensors"))
    assert not list(folder.rglob("manifest.json"))
    assert (folder / "steps" / "capture" / "d1" / "out" / "result.json").exists()
    assert read_status(folder)["steps"][0]["state"] == "finished"
    assert retention.release(folder) == 0


def test_states_are_kept_for_as_many_days(folder: Path) -> None:
    assert retention.expire(folder.parent) == []
    assert list(folder.rglob("*.safetensors"))
    past = time.time() - 3.1 * 86400
    os.utime(folder / "verdict.json", (past, past))
    (note,) = retention.expire(folder.parent)
    assert "3 days are over" in note
    assert not list(folder.rglob("*.safetensors"))
    assert retention.expire(folder.parent) == []


def test_a_run_that_failed_keeps_its_states(folder: Path) -> None:
    (folder / "verdict.json").write_text(json.dumps({"reasons": ["train failed"]}))
    os.utime(folder / "verdict.json", (0, 0))
    assert retention.expire(folder.parent) == []
    assert list(folder.rglob("*.safetensors"))


@pytest.mark.parametrize(("keep", "left"), [("always", True), ("until_verified", False), (3, True)])
def test_keep_after_success(folder: Path, keep: str | int, left: bool) -> None:
    note = retention.after_success(RunFolder(folder), {"store": {"keep": keep}})
    assert (note is None) == left
    assert bool(list(folder.rglob("*.safetensors"))) == left
