"""Run files and their errors."""

from pathlib import Path
from typing import Any

import pytest

from eyas import config
from eyas.errors import UserError
from eyas.spec import StepSpec

RECIPE = Path(__file__).parents[2] / "recipes" / "demo.yaml"


def test_the_demo_recipe_and_overrides() -> None:
    loaded = config.load(RECIPE, ["train.epochs=3.5", "prompts.train=my/file.txt", "train.learning_rate=1e-3"])
    assert loaded.train.epochs == 3.5
    assert loaded.train.learning_rate == 1e-3
    assert loaded.prompts.train == "my/file.txt"
    assert loaded.decode.draft_tokens == 3
    assert config.parse(loaded.model_dump(mode="json"), "again") == loaded


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (["trian.epochs=3"], "unknown key trian; did you mean train?"),
        (["train.epoch=3"], "unknown key train.epoch; did you mean train.epochs?"),
        (["engine.zzz=3"], "unknown key engine.zzz; known here: kind, device, threads"),
        (["train.epochs=x"], "train.epochs: should be a valid number (got 'x')"),
        (["train.epochs=0"], "train.epochs: should be greater than or equal to 0.01 (got 0)"),
        (["train.learning_rate=.inf"], "train.learning_rate: should be a finite number (got inf)"),
        (["draft.vocab_size=x"], "draft.vocab_size: should be a valid integer or should be 'full' (got 'x')"),
        (["draft.vocab_size=0"], "draft.vocab_size: must be at least 1, or 'full' (got 0)"),
        (["train=3"], "train: should be a valid dictionary"),
        (["capture.layers=[1, 2]"], "capture.layers: EAGLE-3 takes three different layers"),
        (["target.chat_template_kwargs={day: 2020-01-01}"], "target.chat_template_kwargs: input was not a valid JSON"),
        (["target.model.x=1"], "override 'target.model.x=1': model is a single value, not a section"),
        (["train.epochs"], "write it as key.key=value"),
        (["train.epochs={"], "the value is not valid YAML"),
        (["name=a/b"], "name: "),
        ([f"name={'n' * 101}"], "name: String should have at most 100 characters"),
        (["train.betas=[0.9, 1]"], "train.betas: should be less than 1 (got 1)"),
        (["train.betas=[-0.1, 0.9]"], "train.betas: should be greater than or equal to 0 (got -0.1)"),
        ([f"seed={2**40}"], "seed: should be less than"),
        (["train.epochs=1e-9"], "train.epochs: should be greater than or equal to 0.01"),
        (["capture.layers=[1, 2, 3, 3]"], "capture.layers: EAGLE-3 takes three different layers (got [1, 2, 3, 3])"),
        (["capture.layers=[-1, 2, 3]"], "capture.layers: ids count from 0"),
        (["capture.layers=[0, 2, 3]"], "capture.layers: 0 is the embedding under hidden_states, which SGLang cannot"),
        (["target.model={{x}}"], "override 'target.model={{x}}': the value is not valid YAML"),
        (["target.model=2026-02-31"], "override 'target.model=2026-02-31': the value is not valid YAML"),
        (["target.model=~nobody-of-this-name/m"], "target.model: "),
        (["target.model="], "target.model: should be a valid string (got None)"),
        (["target="], "target.model is missing"),
    ],
)
def test_errors_name_the_field(overrides: list[str], text: str) -> None:
    with pytest.raises(UserError) as caught:
        config.load(RECIPE, overrides)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"name: demo", "target is missing"),
        (b"- a", "a run file is a mapping"),
        (b"", "a run file is a mapping"),
        (b"name: [", "line 1: not valid YAML"),
        (b"name: a\nname: b\n", "line 2: not valid YAML (name is given twice)"),
        (b"target:\n  model: {{x}}", "line 2: not valid YAML (found unhashable key)"),
        (b"name: 2026-02-31", "not valid YAML (day is out of range for month)"),
        (b"\xff\xfe", "not UTF-8"),
        (b"a" * 1_000_001, "longer than a run file can be"),
    ],
)
def test_files_that_are_none(tmp_path: Path, content: bytes, text: str) -> None:
    (tmp_path / "run.yaml").write_bytes(content)
    with pytest.raises(UserError) as caught:
        config.load(tmp_path / "run.yaml")
    assert text in str(caught.value)
    assert str(tmp_path / "run.yaml") in str(caught.value)


def test_layers_under_the_other_convention() -> None:
    loaded = config.load(RECIPE, ["capture.layers=[0, 2, 3]", "capture.convention=layer_output"])
    assert loaded.capture.layers == [0, 2, 3]


def test_home_is_written_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    loaded = config.load(RECIPE, ["target.model=~/m", "prompts.train=~/p.txt", "prompts.heldout=a~b.txt"])
    assert loaded.target.model == "/home/somebody/m"
    assert (loaded.prompts.train, loaded.prompts.heldout) == ("/home/somebody/p.txt", "a~b.txt")


def test_a_section_left_empty_holds_the_defaults(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("name: a\ntarget: {model: m}\ntrain:\ndecode:\n")
    loaded = config.load(tmp_path / "run.yaml", ["decode.batch=2", "draft="])
    assert (loaded.train, loaded.draft, loaded.decode.batch) == (config.Train(), config.Draft(), 2)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read the run file"):
        config.load(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("text", "value"), [("1e-3", 1e-3), ("1E+3", 1e3), ("-2.5e2", -250.0), (".5e1", 5.0), ("1e", "1e"), ("e3", "e3")]
)
def test_numbers_with_exponents(text: str, value: Any) -> None:
    data: dict[str, Any] = {}
    config._override(data, f"x={text}")
    assert data == {"x": value}


def test_a_spec_gives_checked_sections() -> None:
    spec = StepSpec("train", 0, {"train": config.Train(epochs=1.0).model_dump(mode="json")}, {})
    assert spec.section(config.Train).epochs == 1.0
    with pytest.raises(KeyError, match="draft"):
        spec.section(config.Draft)


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ({"nnodes": 2}, "nnodes: a server over several machines"),
        ({"pp-size": 2}, "pp-size: no process of a pipeline"),
        ({"pipeline-parallel-size": "4"}, "pipeline-parallel-size: no process of a pipeline"),
        ({"disaggregation-mode": "prefill"}, "disaggregation-mode: prefill and decode in separate servers"),
        ({"ssl-keyfile": "k"}, "ssl-keyfile: eyas asks without TLS"),
    ],
)
def test_servers_that_could_not_be_captured_from(args: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        config.Server.model_validate({"args": args})
    assert config.Server.model_validate({"args": {"nnodes": 1, "pp-size": 1, "disaggregation-mode": "null"}})
