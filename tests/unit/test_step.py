"""One step as a program, called in this process."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from eyas import step
from eyas.files import write_json
from eyas.plan import code
from eyas.run import outputs, process

pytestmark = pytest.mark.usefixtures("toys")


def spec(folder: Path, options: dict[str, Any] | None = None, **other: Any) -> list[str]:
    """Write a spec and return the arguments that run it."""
    content = {
        "step": "one",
        "entry": "toys:work",
        "digest": "d",
        "code": code.digest("toys:work"),
        "seed": 0,
        "config": {"one": options or {}},
        "inputs": {},
    } | other
    write_json(folder / "spec.json", content)
    return ["one", "--spec", str(folder / "spec.json"), "--out", str(folder)]


def ended(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "exit.json").read_text()))


def test_output_is_published_whole(tmp_path: Path) -> None:
    assert step.main(spec(tmp_path, {"pieces": 2})) == 0
    assert not (tmp_path / "partial").exists()
    assert outputs.verify(tmp_path / "out") is None
    listed = json.loads((tmp_path / "out" / "outputs.json").read_text())["files"]
    assert listed.keys() == {"piece0", "piece1", "result.json"}
    assert ended(tmp_path)["code"] == 0
    assert ended(tmp_path)["error"] is None
    lines = [json.loads(line) for line in (tmp_path / "progress.jsonl").read_text().splitlines()]
    assert lines[0]["attempt"] == 1
    assert lines[-1]["metric"] == {"loss": None, "step": 1}
    assert max(line.get("done", 0) for line in lines) == 2


def test_a_user_error_is_one_line_and_the_traceback_stays_in_the_log(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert step.main(spec(tmp_path, {"refuse": True})) == 2
    assert ended(tmp_path)["error"] == "sample 3 of prompts.txt is empty"
    assert "Traceback" in capfd.readouterr().err
    assert (tmp_path / "partial" / "piece0").exists()
    assert not (tmp_path / "out").exists()


def test_half_written_pieces_are_removed_before_the_next_attempt(tmp_path: Path) -> None:
    (tmp_path / "partial" / "deep").mkdir(parents=True)
    (tmp_path / "partial" / "deep" / ".piece0.123.partial").write_text("half")
    (tmp_path / "partial" / "piece0").write_text("whole")
    assert step.main(spec(tmp_path)) == 0
    assert not list((tmp_path / "out" / "deep").iterdir())
    assert (tmp_path / "out" / "piece0").read_text() == "whole"


def test_a_finished_step_is_not_run_over(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    assert step.main(spec(tmp_path)) == 2
    assert "is there already" in ended(tmp_path)["error"]


def test_a_running_step_is_not_started_twice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert process.try_lock(tmp_path / "lock") is not None
    assert step.main(spec(tmp_path)) == 2
    assert "is running already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("other", "text"),
    [
        ({"code": "old"}, "the code of one was edited after the run began"),
        ({"step": "two"}, "is for step two, not one"),
        ({"config": {"train": {"epochs": -1}}}, "section train is not valid"),
        ({"entry": "nowhere.at.all:run"}, "nowhere.at.all: no such module"),
    ],
)
def test_check_refuses_a_wrong_spec_and_runs_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], other: dict[str, Any], text: str
) -> None:
    assert step.main([*spec(tmp_path, **other), "--check"]) == 2
    assert text in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["spec.json"]


def test_check_of_a_right_spec(tmp_path: Path) -> None:
    assert step.main([*spec(tmp_path), "--check"]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["spec.json"]


def test_a_spec_that_is_missing_or_damaged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["one", "--spec", str(tmp_path / "spec.json"), "--out", str(tmp_path), "--check"]
    assert step.main(arguments) == 2
    (tmp_path / "spec.json").write_text("{")
    assert step.main(arguments) == 2
    (tmp_path / "spec.json").write_text("[]")
    assert step.main(arguments) == 2
    said = capsys.readouterr().err
    assert "cannot read the spec" in said
    assert "not valid JSON" in said
    assert "lacks step, entry" in said


def test_the_control_plane_imports_no_torch() -> None:
    program = "import sys, eyas.step, eyas.cli, eyas.run.session, eyas.ui.live, eyas.ui.overview, eyas.ui.summary\n"
    program += "print(sorted({'torch', 'numpy', 'transformers', 'safetensors', 'matplotlib'} & sys.modules.keys()))"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
