"""`eyas verify`: a good draft passes, in every spelling; each planted fault fails the check that names it."""

import json
import sys

import pytest
import safetensors.torch
import torch

from eyas import cli
from eyas.draft import checkpoint
from eyas.draft.config import DraftConfig
from eyas.draft.files import read_config, read_tensors
from eyas.draft.verify import checks
from eyas.engines import target as targets
from eyas.engines.sglang.loader import Loader
from eyas.errors import UserError
from eyas.progress import Silent
from test_chain import make_draft
from test_inprocess import load


@pytest.fixture(scope="module")
def target(tiny_llama):
    return load(tiny_llama)


@pytest.fixture
def folder(target, tmp_path):
    checkpoint.save(tmp_path, make_draft(target, vocabulary=50), torch.float32)
    return tmp_path


def failed(folder, info):
    return {check.name for check in checks(folder, info) if check.passed is False}


def tensors(folder, change):
    state = change(safetensors.torch.load_file(folder / "model.safetensors"))
    safetensors.torch.save_file(state, folder / "model.safetensors")


def without(folder, gone):
    tensors(folder, lambda state: {name: tensor for name, tensor in state.items() if name != gone})


def config(folder, **fields):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_a_good_draft_passes(target, folder):
    found = checks(folder, target.info)
    assert not failed(folder, target.info)
    assert {check.name for check in found if check.passed is None} == {"origin"}


@pytest.mark.parametrize(
    "spell",
    [
        lambda name: name.replace("midlayer.", "layers.0."),
        lambda name: "model." + name.replace("midlayer.", "layers.0.") if "lm_head" not in name else name,
    ],
)
def test_other_spellings_mean_the_same(target, folder, spell):
    before = checkpoint.digest(checkpoint.load(folder, target.embedding))
    tensors(folder, lambda state: {spell(name): tensor for name, tensor in state.items()})
    assert not failed(folder, target.info)
    assert checkpoint.digest(checkpoint.load(folder, target.embedding)) == before


def test_the_layout_of_speculators(target, folder):
    plain = json.loads((folder / "config.json").read_text())
    outside = ("architectures", "draft_vocab_size", "target_hidden_size", "eagle_config")
    layer = {name: value for name, value in plain.items() if name not in outside}
    nested = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": 50,
        "target_hidden_size": 32,
        "transformer_layer_config": layer,
    }
    (folder / "config.json").write_text(json.dumps(nested))
    found = {check.name: check for check in checks(folder, target.info)}
    assert not failed(folder, target.info)
    assert found["architecture"].passed is None
    assert "SGLang does not know it" in found["switches"].detail
    shape = checkpoint.load(folder, target.embedding).config
    assert shape.norm_before_residual
    assert shape == DraftConfig.from_target(target.info.config, 50, norm_before_residual=True)


FAULTS = {
    "head": [
        lambda f: without(f, "lm_head.weight"),
        lambda f: tensors(f, lambda s: {**s, "lm_head.weight": torch.zeros(50, 32)}),
        lambda f: config(f, tie_word_embeddings=True),
    ],
    "vocabulary_map": [
        lambda f: without(f, "d2t"),
        lambda f: tensors(f, lambda s: {**s, "d2t": torch.zeros(50, dtype=torch.int64)}),
        lambda f: tensors(f, lambda s: {**s, "d2t": torch.arange(50) + s["d2t"]}),  # ids instead of offsets
        lambda f: tensors(f, lambda s: {**s, "d2t": s["d2t"].flip(0)}),
        lambda f: tensors(f, lambda s: {**s, "t2d": s["t2d"].roll(1)}),
    ],
    "tensors": [
        lambda f: without(f, "fc.weight"),
        lambda f: tensors(f, lambda s: {**s, "layers.1.norm.weight": torch.ones(32)}),
        lambda f: tensors(f, lambda s: {**s, "norm.weight": torch.ones(31)}),
    ],
    "architecture": [
        lambda f: config(f, architectures=["LlamaForCausalLM"]),
        lambda f: config(f, num_hidden_layers=2),
    ],
    "target": [lambda f: config(f, target_hidden_size=64)],
    "layers": [
        lambda f: config(f, eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 3, 8]}),
        lambda f: config(
            f,
            eagle_aux_hidden_state_layer_ids=[3, 5, 6],
            eagle_config={"eagle_aux_hidden_state_layer_ids": [3, 5, 6]},
        ),
        lambda f: config(f, eagle_config={"use_aux_hidden_state": False}),
        lambda f: config(f, eyas={"contract": {"layers": [3, 5, 6]}}),
    ],
    "rope": [
        lambda f: config(f, rope_parameters={"rope_type": "default", "rope_theta": 5e5}),
        lambda f: config(f, rope_theta=5e5),
        lambda f: config(f, rope_parameters=None, rope_theta=1e4, rope_scaling={"rope_type": "linear", "factor": 2.0}),
    ],
    "positions": [lambda f: config(f, max_position_embeddings=256)],
    "switches": [lambda f: config(f, eagle_config={"norm_output": True})],
    "dtype": [
        lambda f: tensors(f, lambda s: {**s, "norm.weight": s["norm.weight"].half()}),
        lambda f: config(f, dtype="bfloat16"),
    ],
    "numbers": [lambda f: tensors(f, lambda s: {**s, "fc.weight": s["fc.weight"] / 0})],
    "origin": [lambda f: config(f, eyas={"contract": {"model_digest": "another"}})],
    "files": [
        lambda f: (f / "model.safetensors").unlink(),
        lambda f: (f / "model.safetensors").write_bytes(b"cut"),
        lambda f: (f / "config.json").unlink(),
    ],
}


@pytest.mark.parametrize(("name", "plant"), [(name, plant) for name, all_ in FAULTS.items() for plant in all_])
def test_a_fault_fails_its_check(target, folder, name, plant):
    plant(folder)
    assert failed(folder, target.info) == {name}


@pytest.mark.parametrize(
    ("field", "value", "names"),
    [
        ("draft_vocab_size", 51, {"head", "vocabulary_map"}),
        ("vocab_size", 300, {"target", "vocabulary_map"}),
        ("hidden_size", 64, {"target", "tensors", "head"}),
        ("num_attention_heads", None, {"sizes"}),
    ],
)
def test_sizes_that_are_not_the_tensors(target, folder, field, value, names):
    fields = json.loads((folder / "config.json").read_text()) | {field: value}
    (folder / "config.json").write_text(json.dumps({k: v for k, v in fields.items() if v is not None}))
    assert failed(folder, target.info) == names


def test_ids_that_one_engine_reads(target, folder):
    config(folder, eagle_aux_hidden_state_layer_ids=[3, 5, 6])
    layers = next(check for check in checks(folder, target.info) if check.name == "layers")
    assert layers.passed is None
    assert "SGLang does not read them" in layers.detail


def test_the_command(tiny_llama, folder, monkeypatch, capsys):
    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["eyas", "verify", str(folder), "--target", str(tiny_llama), *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return ended.value.code or 0, *capsys.readouterr()

    code, out, _ = call("--json")
    assert code == 0
    assert {check["passed"] for check in json.loads(out)["checks"]} == {True, None}
    (folder / "model.safetensors").write_bytes(b"cut")
    code, out, err = call()
    assert code == 2
    assert "FAIL  files" in out
    assert err.splitlines()[-1] == f"eyas: {folder}: files failed; the table says how to mend it"


def test_eagle_3_1_switches_stand_where_engines_read_them(target, tmp_path):
    checkpoint.save(tmp_path, make_draft(target, vocabulary=50, fc_norm=True, norm_output=True), torch.float32)
    written = json.loads((tmp_path / "config.json").read_text())
    for place in (written, written["eagle_config"]):
        assert (place["fc_norm"], place["norm_output"]) == (True, True)
    assert not failed(tmp_path, targets.inspect(str(target.info.folder), Silent()))
    assert "fc_norm.2.weight" in read_tensors(tmp_path)


def interpreter(folder, says, code=0):
    """A program in place of an interpreter that has SGLang."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\necho warnings first\nprintf '%s' '{says}'\nexit {code}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("says", "passed", "detail"),
    [
        ({}, True, "SGLang 9 takes every tensor and fills every parameter"),
        ({"ignored": ["a"], "unfilled": ["b"]}, False, "SGLang 9: it ignores a; it leaves b uninitialised"),
        ({"refused": {"a": "too wide"}}, False, "it refuses a (too wide)"),
        ("ModuleNotFoundError: No module named 'sglang'", None, "cannot be asked: ModuleNotFoundError"),
    ],
)
def test_what_sglangs_loader_says(tmp_path, says, passed, detail):
    if isinstance(says, dict):
        says = json.dumps({"sglang": "9", "ignored": [], "refused": {}, "unfilled": []} | says)
    found = Loader(tmp_path, interpreter(tmp_path, says.replace("'", ""))).check()
    assert found.passed is passed
    assert detail.replace("'", "") in found.detail


def test_an_interpreter_that_is_none(tmp_path):
    with pytest.raises(UserError, match=r"nothing: cannot be run \(No such file"):
        Loader(tmp_path, str(tmp_path / "nothing"))
    slow = Loader(tmp_path, interpreter(tmp_path, "", "$(sleep 60)"))
    slow.stop()
    assert slow.check().passed is None


def test_architectures_that_are_no_list_are_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": 3}')
    with pytest.raises(UserError, match=r"config\.json: architectures is 3; write a list"):
        read_config(tmp_path)
