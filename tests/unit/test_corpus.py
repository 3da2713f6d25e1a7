"""Rendering with the target's template, and the prompts step."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eyas.corpus import step
from eyas.corpus.keys import prompt_key
from eyas.corpus.read import Row, read
from eyas.corpus.render import Renderer
from eyas.corpus.template import OURS
from eyas.engines import target
from eyas.errors import UserError
from eyas.progress import Silent
from eyas.spec import StepSpec

Prompts = Callable[..., dict[str, Any]]


def ask(text: str) -> Row:
    return Row([{"role": "user", "content": text}], "", "my.txt:1")


@pytest.fixture
def info(tiny_llama: Path) -> target.TargetInfo:
    return target.inspect(str(tiny_llama), Silent())


@pytest.fixture
def prompts(tiny_llama: Path, tmp_path: Path) -> Prompts:
    """Runs the step on files of these lines; results are in tmp_path / "out"."""
    before, out = tmp_path / "target", tmp_path / "out"
    before.mkdir()
    out.mkdir()
    target.run(StepSpec("target", 0, {"target": {"model": str(tiny_llama)}, "engine": {}}, {}), before, Silent())

    def run(
        train: list[str], heldout: list[str], kwargs: dict[str, Any] | None = None, **limits: int
    ) -> dict[str, Any]:
        files = {"train": train, "heldout": heldout}
        for name, lines in files.items():
            (tmp_path / f"{name}.txt").write_text("\n".join(lines))
        sets = {name: str(tmp_path / f"{name}.txt") for name in files}
        model = {"model": str(tiny_llama), "chat_template_kwargs": kwargs or {}}
        config = {"target": model, "prompts": {**sets, **limits}, "data": {}}
        return step.run(StepSpec("prompts", 0, config, {"target": before}), out, Silent())

    return run


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_ids_are_those_of_the_rendered_text(info: target.TargetInfo) -> None:
    from tokenizers import Tokenizer

    ids = Renderer(info, {})(ask("héllo\n"))
    tokenizer = Tokenizer.from_file(str(info.folder / "tokenizer.json"))
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|start|>user\nhéllo\n<|end|><|start|>assistant\n"
    assert ids[0] == 1
    assert all(type(token) is int for token in ids)


def test_smollm2_gets_its_system_prompt_once(smollm2: Path) -> None:
    info = target.inspect(str(smollm2), Silent())
    ids = Renderer(info, {})(ask("12 + 3?"))
    assert ids[:3] == [1, 9690, 198]
    assert ids.count(1) == 3
    assert ids[-4:] == [1, 520, 9531, 198]
    assert max(len(Renderer(info, {})(row)) for row in read("builtin", "heldout", 5)[0]) < 200


def test_template_variables(info: target.TargetInfo, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(info.folder, tmp_path / "model"))
    (folder / "chat_template.jinja").write_text("{% if short %}S{% else %}L{% endif %}{{ messages[0]['content'] }}")
    info = replace(info, folder=folder)
    assert Renderer(info, {"short": True})(ask("x")) != Renderer(info, {"short": False})(ask("x"))


def test_template_that_refuses(info: target.TargetInfo, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(info.folder, tmp_path / "model"))
    (folder / "chat_template.jinja").write_text("{{ raise_exception('roles must\nalternate') }}")
    with pytest.raises(
        UserError, match=r"my\.txt:1: the target's chat template refuses this row \(roles must alternate"
    ):
        Renderer(replace(info, folder=folder), {})(ask("x"))


def test_tokenizer_of_another_model(info: target.TargetInfo) -> None:
    with pytest.raises(UserError, match=r"my\.txt:1: token id \d+ is outside the target's vocabulary of 50"):
        Renderer(replace(info, vocab_size=50), {})(ask("x"))


def test_tokenizer_that_cannot_be_loaded(info: target.TargetInfo, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(info.folder, tmp_path / "model"))
    (folder / "tokenizer.json").write_text('{"model": {}}')
    with pytest.raises(UserError, match="the tokenizer cannot be loaded"):
        Renderer(replace(info, folder=folder), {})


@pytest.mark.parametrize("name", sorted(OURS))
def test_arguments_that_are_no_template_variables(info: target.TargetInfo, name: str) -> None:
    with pytest.raises(UserError, match=f"chat_template_kwargs: {name} is set by eyas"):
        Renderer(info, {name: False})


def test_step_writes_rows_in_order(prompts: Prompts, tmp_path: Path) -> None:
    result = prompts(["c", "a", "b"], ["x", "y"])
    assert (result["train"], result["heldout"], result["rejected"]) == (3, 2, {})
    assert "transformers" in result["versions"]
    train = rows(tmp_path / "out" / "train.jsonl")
    assert [row["source"] for row in train] == [f"{tmp_path / 'train.txt'}:{number}" for number in (1, 2, 3)]
    assert all(row.keys() == {"key", "ids", "form", "source"} for row in train)
    assert all(row["key"] == prompt_key(row["ids"]) for row in train)


def test_step_keeps_each_prompt_once(prompts: Prompts, tmp_path: Path) -> None:
    result = prompts(["a", "b", "a", "x", "a"], ["x", "x", "y", "o" * 600])
    assert result["rejected"] == {step.DUPLICATE: 3, step.HELD_OUT: 1, step.TOO_LONG: 1}
    assert [row["source"][-1] for row in rows(tmp_path / "out" / "train.jsonl")] == ["1", "2"]
    assert [row["source"][-1] for row in rows(tmp_path / "out" / "heldout.jsonl")] == ["1", "3"]


def test_step_applies_limits_first(prompts: Prompts) -> None:
    result = prompts(["a", "a", "b"], ["x", "y", "a"], train_limit=2, heldout_limit=2)
    assert (result["train"], result["heldout"], result["rejected"]) == (1, 2, {step.DUPLICATE: 1})


def test_step_needs_rows_in_both_sets(prompts: Prompts) -> None:
    with pytest.raises(UserError, match=r"prompts\.train: no row of .*train\.txt is left \(2 rejected: also held out"):
        prompts(["x", "y"], ["x", "y"])
    with pytest.raises(UserError, match=r"prompts\.heldout: no row of .*heldout\.txt is left \(1 rejected: longer"):
        prompts(["x", "y"], ["o" * 600])


def test_step_passes_template_variables_on(prompts: Prompts) -> None:
    with pytest.raises(UserError, match="tokenize is set by eyas"):
        prompts(["a"], ["b"], {"tokenize": False})


def test_step_takes_any_data_and_puts_down_what_it_cannot_use(tiny_llama: Path, tmp_path: Path) -> None:
    before, out, data = tmp_path / "target", tmp_path / "out", tmp_path / "data"
    for folder in (before, out, data):
        folder.mkdir()
    target.run(StepSpec("target", 0, {"target": {"model": str(tiny_llama)}, "engine": {}}, {}), before, Silent())
    said = [("human", "a"), ("gpt", "b"), ("human", "c"), ("gpt", "d")]
    talk = {"conversations": [{"from": role, "value": text} for role, text in said]}
    (data / "talks.json").write_text(json.dumps([talk, {"messages": [{"role": "wizard"}]}], indent=1))
    (data / "table.csv").write_text("question,answer\nx,y\n")
    (tmp_path / "held.txt").write_text("held out\n")

    def run(most: float) -> dict[str, Any]:
        config = {
            "target": {"model": str(tiny_llama)},
            "prompts": {"train": str(data), "heldout": str(tmp_path / "held.txt")},
            "data": {"max_rejected": most},
        }
        return step.run(StepSpec("prompts", 0, config, {"target": before}), out, Silent())

    result = run(0.5)
    assert (result["train"], result["heldout"], result["rejected"]) == (3, 1, {"unknown role": 1})
    assert [row["source"].removeprefix(f"{data}/") for row in rows(out / "train.jsonl")] == [
        "table.csv:2",
        "talks.json:2",
        "talks.json:2 turn 2",
    ]
    (refused,) = rows(out / "rejected.jsonl")
    assert (refused["file"], refused["line"]) == (f"{data}/talks.json", 22)
    with pytest.raises(
        UserError, match=r"1 of 5 rows cannot be used, more than 5\.0% \(1 rejected: unknown role\), first"
    ):
        run(0.05)


def test_step_counts_rows_that_the_template_refuses(tiny_llama: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_llama, tmp_path / "model"))
    (folder / "chat_template.jinja").write_text(
        "{% if messages[0].content == 'bad' %}{{ raise_exception('no') }}{% endif %}{{ messages[0].content }}"
    )
    before, out = tmp_path / "target", tmp_path / "out"
    before.mkdir()
    out.mkdir()
    target.run(StepSpec("target", 0, {"target": {"model": str(folder)}, "engine": {}}, {}), before, Silent())
    (tmp_path / "train.txt").write_text("a\nbad\nb\n")
    (tmp_path / "held.txt").write_text("c\n")
    config = {
        "target": {"model": str(folder)},
        "prompts": {"train": str(tmp_path / "train.txt"), "heldout": str(tmp_path / "held.txt")},
        "data": {"max_rejected": 0.5},
    }
    result = step.run(StepSpec("prompts", 0, config, {"target": before}), out, Silent())
    assert (result["train"], result["rejected"]) == (2, {"the chat template refuses it": 1})
    assert rows(out / "rejected.jsonl")[0]["line"] == 2
