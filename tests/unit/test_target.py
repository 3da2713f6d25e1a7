"""The target step: what it finds, and every refusal."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eyas.engines import fetch, target
from eyas.errors import UserError
from eyas.progress import Silent
from eyas.spec import StepSpec


@pytest.fixture
def folder(tiny_llama: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model that may be spoilt."""
    return Path(shutil.copytree(tiny_llama, tmp_path / "model"))


def look(folder: Path | str) -> target.TargetInfo:
    return target.inspect(str(folder), Silent())


def edit(path: Path, **changes: Any) -> None:
    content = {**json.loads(path.read_text()), **changes} if path.exists() else changes
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))


def shard(folder: Path) -> None:
    """Split the single weight file in two, with an index."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    places = {name: f"model-0000{1 + index % 2}-of-00002.safetensors" for index, name in enumerate(tensors)}
    for file in set(places.values()):
        save_file({name: tensors[name] for name, place in places.items() if place == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def test_finds_sizes_and_end_tokens(folder: Path) -> None:
    edit(folder / "generation_config.json", eos_token_id=[1, 5])
    info = look(folder)
    assert (info.architecture, info.num_layers, info.hidden_size, info.vocab_size) == ("LlamaForCausalLM", 8, 32, 259)
    assert info.eos_token_ids == (1, 2, 5)
    assert info.folder == folder.resolve()
    assert info.config == info.text_config == json.loads((folder / "config.json").read_text())


def test_end_token_of_the_tokenizer_alone_counts(folder: Path) -> None:
    for name in ("config.json", "generation_config.json"):
        edit(folder / name, eos_token_id=...)
    assert look(folder).eos_token_ids == (2,)
    edit(folder / "tokenizer_config.json", eos_token={"content": "!"})
    tokens = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    assert look(folder).eos_token_ids == (tokens["!"],)


def test_nested_text_config(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    outer = {"architectures": ["SomeVisionModel"], "text_config": config, "vision_config": {}}
    (folder / "config.json").write_text(json.dumps(outer))
    info = look(folder)
    assert (info.num_layers, info.architecture) == (8, "SomeVisionModel")
    assert info.text_config == config


def test_sharded(folder: Path) -> None:
    single = look(folder).model_digest
    shard(folder)
    assert look(folder).model_digest != single


def test_digests_tell_changes_apart(folder: Path) -> None:
    def digests() -> tuple[str, str, str]:
        info = look(folder)
        return info.model_digest, info.tokenizer_digest, info.template_digest

    before = digests()
    assert digests() == before
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    template = digests()
    assert [a == b for a, b in zip(before, template, strict=True)] == [True, True, False]
    edit(folder / "tokenizer_config.json", add_prefix_space=True)
    tokenizer = digests()
    assert [a == b for a, b in zip(template, tokenizer, strict=True)] == [True, False, True]
    edit(folder / "config.json", rope_theta=5.0)
    assert [a == b for a, b in zip(tokenizer, digests(), strict=True)] == [False, True, True]


def test_template_may_stand_in_the_tokenizer_config(folder: Path) -> None:
    jinja = folder / "chat_template.jinja"
    before = look(folder)
    edit(folder / "tokenizer_config.json", chat_template=jinja.read_text())
    jinja.unlink()
    assert look(folder) == before


def test_run_writes_what_read_returns(folder: Path, tmp_path: Path) -> None:
    spec = StepSpec("target", 0, {"target": {"model": str(folder)}, "engine": {}}, {})
    result = target.run(spec, tmp_path, Silent())
    info = target.read(tmp_path)
    assert info == look(folder)
    assert result == {
        "folder": str(folder.resolve()),
        "model_digest": info.model_digest,
        "architecture": "LlamaForCausalLM",
        "layers": 8,
        "hidden_size": 32,
        "vocab_size": 259,
    }
    shutil.rmtree(folder)
    with pytest.raises(UserError, match="gone since the run began"):
        target.read(tmp_path)


def test_a_fetched_model_that_has_gone_is_fetched_again(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "fetch", lambda name, progress: folder)
    spec = StepSpec("target", 0, {"target": {"model": "smollm2-135m-instruct"}, "engine": {}}, {})
    target.run(spec, tmp_path, Silent())
    moved = folder.rename(tmp_path / "elsewhere")
    monkeypatch.setattr(fetch, "fetch", lambda name, progress: moved)
    assert target.read(tmp_path).folder == moved


def test_smollm2(smollm2: Path) -> None:
    info = look("smollm2-135m-instruct")
    target.require_in_process(info)
    assert (info.folder, info.num_layers, info.vocab_size, info.eos_token_ids) == (smollm2, 30, 49152, (2,))


def test_quick_without_torch() -> None:
    code = (
        "import sys, eyas.engines.target; sys.exit(any(m in sys.modules for m in ('torch', 'transformers', 'numpy')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


def only(folder: Path, name: str) -> None:
    (folder / "model.safetensors").rename(folder / name)


def no_template(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()


def second_shard(folder: Path) -> Path:
    shard(folder)
    return folder / "model-00002-of-00002.safetensors"


def misplaced(folder: Path) -> None:
    shard(folder)
    index = folder / "model.safetensors.index.json"
    places = json.loads(index.read_text())["weight_map"]
    index.write_text(json.dumps({"weight_map": {**places, "ghost": "model-00001-of-00002.safetensors"}}))


REFUSALS: list[tuple[str, Callable[[Path], Any], str]] = [
    ("no config", lambda f: (f / "config.json").unlink(), "no config.json"),
    ("broken config", lambda f: cut(f / "config.json", 40), "config.json: not valid JSON"),
    ("config is a list", lambda f: (f / "config.json").write_text("[]"), "config.json: not a JSON object"),
    ("no architecture", lambda f: edit(f / "config.json", architectures=...), "names no architecture"),
    ("no layers", lambda f: edit(f / "config.json", num_hidden_layers=...), "num_hidden_layers is None"),
    ("odd size", lambda f: edit(f / "config.json", hidden_size="32"), "hidden_size is '32'"),
    ("no weights", lambda f: (f / "model.safetensors").unlink(), "no model.safetensors; download"),
    ("bin only", lambda f: only(f, "pytorch_model.bin"), r"only PyTorch \(.bin\) weights; save"),
    ("gguf only", lambda f: only(f, "x.Q4_K.gguf"), "only GGUF weights"),
    ("adapter", lambda f: only(f, "adapter_model.safetensors"), "merge it"),
    ("other layout", lambda f: only(f, "consolidated.safetensors"), "only consolidated.safetensors"),
    ("cut file", lambda f: cut(f / "model.safetensors", 100_000), "cut short, 100,000 bytes instead of"),
    ("cut header", lambda f: cut(f / "model.safetensors", 99), "cut short within its header"),
    ("empty file", lambda f: cut(f / "model.safetensors", 0), "cut short within its header"),
    ("no header", lambda f: (f / "model.safetensors").write_bytes(b"\x02" + bytes(7) + b"[]"), "not a safetensors"),
    (
        "long file",
        lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes() + b"x"),
        "longer than its header says",
    ),
    ("lfs", lambda f: (f / "model.safetensors").write_text("version https://git-lfs"), "git lfs pull"),
    ("missing shard", lambda f: second_shard(f).unlink(), "00002.safetensors: missing; 1 of the 2"),
    ("cut shard", lambda f: cut(second_shard(f), 50_000), "00002.safetensors: cut short, 50,000 bytes instead"),
    ("misplaced tensor", misplaced, "lacks ghost"),
    ("empty index", lambda f: (f / "model.safetensors.index.json").write_text("{}"), "has no weight_map"),
    ("leftover", lambda f: (f / "model.safetensors.part").touch(), "broken off"),
    ("no tokenizer", lambda f: (f / "tokenizer.json").unlink(), "has no tokenizer"),
    ("broken tokenizer", lambda f: cut(f / "tokenizer.json", 400), "tokenizer.json: not valid JSON"),
    ("no template", no_template, "no chat template; take a model made for chat"),
    ("end token outside", lambda f: edit(f / "config.json", eos_token_id=259), "259 is outside the vocabulary"),
    ("end token a word", lambda f: edit(f / "config.json", eos_token_id="end"), "eos_token_id is 'end'"),
]


@pytest.mark.parametrize(("spoil", "message"), [case[1:] for case in REFUSALS], ids=[case[0] for case in REFUSALS])
def test_refused(folder: Path, spoil: Callable[[Path], Any], message: str) -> None:
    spoil(folder)
    with pytest.raises(UserError, match=message) as caught:
        look(folder)
    assert "\n" not in str(caught.value)
    assert str(folder) in str(caught.value)


def test_no_end_token_at_all(folder: Path) -> None:
    for name in ("config.json", "generation_config.json"):
        edit(folder / name, eos_token_id=...)
    edit(folder / "tokenizer_config.json", eos_token=...)
    with pytest.raises(UserError, match="no token that ends an answer"):
        look(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, "supported are LlamaForCausalLM, Qwen2"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised weights"),
        ({"logit_scale": 0.0625}, "logit_scale changes the logits"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping changes the logits"),
    ],
)
def test_not_for_the_in_process_engine(folder: Path, changes: dict[str, Any], message: str) -> None:
    edit(folder / "config.json", **changes)
    with pytest.raises(UserError, match=message):
        target.require_in_process(look(folder))


def test_in_process_engine_takes_neutral_settings(folder: Path) -> None:
    edit(folder / "config.json", logit_scale=1.0, final_logit_softcapping=None, quantization_config=None)
    target.require_in_process(look(folder))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("smollm2-135m", "did you mean smollm2-135m-instruct"),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", "did you mean smollm2-135m-instruct"),
        ("/no/such/folder", "eyas can fetch smollm2-135m-instruct"),
        (__file__, "is a file; give the model's folder"),
    ],
)
def test_no_such_model(model: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        look(model)
