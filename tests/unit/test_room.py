"""What states will take is said, and refused, before any is there."""

import json
from pathlib import Path

import pytest
import torch

from eyas import room
from eyas.config import RunConfig, parse
from eyas.engines import answers
from eyas.errors import UserError
from eyas.plan import digests, graph
from eyas.plan.digests import Plan
from eyas.run.folder import RunFolder
from eyas.ui.budget import budget


def made(**sections: object) -> tuple[RunConfig, Plan]:
    config = parse({"name": "t", "target": {"model": "m"}, **sections}, "test")
    return config, digests.make(graph.build(config), config.model_dump(mode="json"), 0, graph.build_services(config))


def put(folder: Path, plan: Plan, step: str, files: dict[str, str]) -> None:
    out = RunFolder(folder).step(next(planned for planned in plan.steps if planned.name == step)).out
    out.mkdir(parents=True)
    for name, text in files.items():
        (out / name).write_text(text)


def test_plan_says_what_states_take(tmp_path: Path) -> None:
    config, plan = made(store={"codec": "fp8"}, answers={"max_new_tokens": 10}, capture={"dtype": "bfloat16"})
    (line,) = budget(tmp_path / "run", config, plan)
    assert line.startswith("States: of unknown size")
    put(tmp_path, plan, "target", {"result.json": json.dumps({"hidden_size": 7168})})
    (line,) = budget(tmp_path, config, plan)
    assert line.startswith("States: 28,697 bytes a token (fp8); how many is known after the prompts step; free: ")
    rows = "".join(json.dumps({"ids": [1] * 30}) + "\n" for _ in range(5))
    put(tmp_path, plan, "prompts", {"train.jsonl": rows, "heldout.jsonl": rows})
    (line,) = budget(tmp_path, config, plan)
    total = 200 * (4 * 7168 + 25) + 200 * (4 * 7168 * 4 + 9)
    assert f"at most 400 tokens, {room.size(total)}; free: " in line
    assert "in /dev/shm" in line
    put(tmp_path, plan, "capture", {"outputs.json": "{}"})
    assert budget(tmp_path, config, plan) == []


def test_plan_says_that_they_may_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, plan = made()
    put(tmp_path, plan, "target", {"result.json": json.dumps({"hidden_size": 7168})})
    row = json.dumps({"ids": [1] * 30}) + "\n"
    put(tmp_path, plan, "prompts", {"train.jsonl": row, "heldout.jsonl": row})
    monkeypatch.setattr("eyas.ui.budget.free", lambda folder: 64 << 10)
    assert budget(tmp_path, config, plan)[1].startswith("  They may not fit: set store.codec=fp8")


@pytest.mark.parametrize(("kind", "wide"), [("float32", 4), ("bfloat16", 2), ("fp8", 1)])
def test_bytes_of_a_token(kind: str, wide: int) -> None:
    assert room.token_bytes(7168, kind) == 4 * 7168 * wide + 9 + (16 if kind == "fp8" else 0)


def test_answers_that_cannot_fit_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work = answers.Work("train", "x", [[1] * 100] * 10, 20, torch.bfloat16)
    told = answers.require_room(tmp_path, [work], 128)
    assert told.startswith(f"states: at least {room.size(1020 * 1033)}, at most {room.size(1200 * 1033)}; ")
    monkeypatch.setattr(answers, "free", lambda folder: 1 << 20)
    with pytest.raises(UserError, match=r"at least 1\.0 MiB.*1\.0 MiB free in .*take fewer prompts"):
        answers.require_room(tmp_path, [work], 128)


def test_free_of_a_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    assert room.free(tmp_path / "a" / "b") > 0
