"""The executor on real child processes."""

import json
import os
import shutil
import time
from pathlib import Path

import pytest

import toyrun
from eyas.errors import UserError
from eyas.plan.graph import Step
from eyas.run import process
from eyas.run.folder import RunFolder, StepFolder
from eyas.run.journal import events
from eyas.ui.overview import as_text, planned, read_status

pytestmark = pytest.mark.usefixtures("toys")


def test_a_run_leaves_what_the_seams_promise(tmp_path: Path) -> None:
    code, seen = toyrun.run(tmp_path / "run", {"one": {"pieces": 3}})
    assert code == 0
    assert sorted(seen.ran()) == ["export", "one", "side", "two"]
    assert seen.states.index("one finished") < seen.states.index("two running")
    assert [text for text in seen.said if text.startswith("one")] == ["one: begins at piece 0", "one: works"]
    run = RunFolder(tmp_path / "run")
    one = run.steps()["one"]
    names = {"spec.json", "process.json", "progress.jsonl", "heartbeat", "log.txt", "exit.json", "out", "lock"}
    assert {path.name for path in one.path.iterdir()} == names
    assert one.result()["pieces"] == 3
    assert one.exit()["code"] == 0
    assert run.steps()["two"].result()["inputs"] == ["one"]
    assert (tmp_path / "run" / "draft" / "piece0").read_text() == "export 0\n"
    assert json.loads((tmp_path / "run" / "versions.json").read_text())["toy"] == "1"
    trace = json.loads((tmp_path / "run" / "timeline.json").read_text())
    assert {event["name"] for event in trace["traceEvents"] if event["ph"] == "X"} == {"one", "two", "side", "export"}
    verdict = json.loads((tmp_path / "run" / "verdict.json").read_text())
    assert verdict["seconds"].keys() == {"one", "two", "side", "export"}
    assert [event["state"] for event in events(run.journal) if event["step"] == "one"] == [
        "starting",
        "running",
        "finished",
    ]


def test_editing_one_section_runs_only_what_follows(tmp_path: Path) -> None:
    toyrun.run(tmp_path)
    code, seen = toyrun.run(tmp_path)
    assert (code, seen.ran()) == (0, [])
    code, seen = toyrun.run(tmp_path, {"two": {"pieces": 2}})
    assert (code, seen.ran()) == (0, ["two", "export"])
    code, seen = toyrun.run(tmp_path)  # Back to the first: it is still there.
    assert (code, seen.ran()) == (0, [])
    trace = json.loads((tmp_path / "timeline.json").read_text())
    assert all(about["reused"] for about in trace["otherData"]["steps"].values())


def test_only_two_digests_a_step_are_kept(tmp_path: Path) -> None:
    (step,) = steps = (Step("export", "toys:work", sections=("export",), product=True),)
    for pieces in (1, 2, 3):
        toyrun.run(tmp_path, {"export": {"pieces": pieces}}, steps=steps)
    toyrun.run(tmp_path, {"export": {"refuse": True}}, steps=steps)
    code, _ = toyrun.run(tmp_path, {"export": {"crash": True}}, steps=steps)
    assert code == 1
    home = tmp_path / "steps" / step.name
    assert len(list(home.iterdir())) == 4  # Runs that failed delete nothing.
    assert (tmp_path / "draft" / "piece2").exists()
    toyrun.run(tmp_path, {"export": {"pieces": 2}}, steps=steps)
    assert sorted(len(list(path.glob("out/piece*"))) for path in home.iterdir()) == [2, 3]


def test_aborted_tries_delete_no_finished_work(tmp_path: Path) -> None:
    toyrun.run(tmp_path)
    for lines in (2, 3, 4):
        assert toyrun.run(tmp_path, {"one": {"lines": lines, "refuse": True}})[0] == 2
    code, seen = toyrun.run(tmp_path)
    assert (code, seen.ran()) == (0, [])
    assert all(len(list(home.iterdir())) == 1 for home in (tmp_path / "steps").iterdir())


def test_what_the_draft_was_made_of_is_kept(tmp_path: Path) -> None:
    toyrun.run(tmp_path)
    made_of = [step.path for name, step in RunFolder(tmp_path).steps().items() if name != "side"]
    for pieces in (2, 3, 4):  # Runs that export nothing: the link stays.
        code, _ = toyrun.run(tmp_path, {"one": {"pieces": pieces}, "two": {"pieces": pieces}}, steps=toyrun.CHAIN[:2])
        assert code == 0
    assert all(path.is_dir() for path in made_of)
    assert len(list((tmp_path / "steps" / "one").iterdir())) == 3


def test_nothing_is_run_for_nobody(tmp_path: Path) -> None:
    toyrun.run(tmp_path)
    steps = RunFolder(tmp_path).steps()
    shutil.rmtree(steps["one"].path)
    (steps["two"].out / "piece0").write_text("damaged")
    code, seen = toyrun.run(tmp_path)
    assert (code, seen.ran()) == (0, [])
    assert any(note.endswith("piece0 is damaged, but all that reads it is finished") for note in seen.notes)
    assert planned(tmp_path, toyrun.plan()).count("not needed: all that reads it is finished") == 2
    code, seen = toyrun.run(tmp_path, {"export": {"pieces": 2}})
    assert (code, seen.ran()) == (0, ["one", "two", "export"])


def test_a_file_in_place_of_an_output_is_replaced(tmp_path: Path) -> None:
    toyrun.run(tmp_path)
    out = RunFolder(tmp_path).steps()["export"].out
    shutil.rmtree(out)
    out.touch()
    code, seen = toyrun.run(tmp_path)
    assert (code, seen.ran()) == (0, ["export"])
    assert any("it is a file, not a folder" in note for note in seen.notes)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"pid": null}', '{"code": 0, "error": 3}', '{"spent": "x"}'])
def test_damaged_control_files_count_as_absent(tmp_path: Path, text: str) -> None:
    toyrun.run(tmp_path)
    (tmp_path / "lock").write_text(text)
    steps = RunFolder(tmp_path).steps()
    for step in steps.values():
        (step.path / "process.json").write_text(text)
        (step.path / "exit.json").write_text(text)
    (steps["side"].out / "piece0").unlink()
    assert as_text(read_status(tmp_path))
    code, seen = toyrun.run(tmp_path, {"export": {"pieces": 2}})
    assert (code, sorted(seen.ran())) == (0, ["export", "side"])


def test_damaged_numbers_count_as_absent(tmp_path: Path) -> None:
    toyrun.run(tmp_path, {"one": {"refuse": True}}, steps=toyrun.CHAIN[:1])
    step = RunFolder(tmp_path).steps()["one"]
    for name in ("process.json", "exit.json"):
        path = step.path / name
        path.write_text(json.dumps(json.loads(path.read_text()) | {"spent": "x", "started": [], "attempt": "y"}))
    assert step.seconds() is None
    code, _ = toyrun.run(tmp_path, {"one": {"refuse": True}}, steps=toyrun.CHAIN[:1])
    assert code == 2
    assert json.loads((step.path / "process.json").read_text())["attempt"] == 1


@pytest.mark.parametrize(
    "text", ["{}", "[]", '{"steps": 3}', '{"steps": [{}]}', '{"steps": [{"name": 1, "digest": 2}]}']
)
def test_a_damaged_plan_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(UserError, match=r"plan\.json names no steps"):
        read_status(tmp_path)


def test_a_damaged_output_is_made_again(tmp_path: Path) -> None:
    toyrun.run(tmp_path, {"one": {"lines": 100}}, steps=toyrun.CHAIN[:1])
    out = RunFolder(tmp_path).steps()["one"].out
    os.truncate(out / "piece0", 50)
    code, seen = toyrun.run(tmp_path, {"one": {"lines": 100}}, steps=toyrun.CHAIN[:1])
    assert (code, seen.ran()) == (0, ["one"])
    assert any("piece0 is damaged" in note for note in seen.notes)
    assert (out / "piece0").read_text() == "one 0\n" * 100


def test_a_failed_step_lets_independent_ones_finish(tmp_path: Path) -> None:
    code, seen = toyrun.run(tmp_path, {"one": {"refuse": True}, "side": {"pieces": 3, "sleep": 0.2}})
    assert code == 2
    assert "side finished" in seen.states
    assert "two running" not in seen.states
    assert seen.views["one"].error == "sample 3 of prompts.txt is empty"
    assert json.loads((tmp_path / "verdict.json").read_text())["reasons"] == [
        "one failed: sample 3 of prompts.txt is empty"
    ]


@pytest.mark.parametrize(
    ("options", "code", "text"),
    [
        ({"crash": True}, 1, "ZeroDivisionError: a real fault; log: "),
        ({"kill": True}, 2, "killed by the system, most likely for want of memory: lower answers.batch"),
        ({"memory": True}, 2, "out of memory: lower answers.batch"),
        ({"extra": True}, 2, "torch is not installed: pip install 'eyas[train]'"),
        ({"exit": 75}, 1, "exit code 75"),
        ({"exit": 0}, 1, "exit code 1"),
    ],
)
def test_how_steps_fail(tmp_path: Path, options: dict[str, object], code: int, text: str) -> None:
    found, seen = toyrun.run(tmp_path, {"one": options}, steps=toyrun.CHAIN[:1])
    assert found == code
    assert text in (seen.views["one"].error or "")
    assert "\n" not in (seen.views["one"].error or "")


def test_a_library_that_ends_the_process_for_want_of_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = "OpenBLAS error: Memory allocation still failed after 10 retries, giving up."
    monkeypatch.setattr(StepFolder, "last_log_line", lambda folder: line)
    code, seen = toyrun.run(tmp_path, {"one": {"exit": 1}}, steps=toyrun.CHAIN[:1])
    assert code == 2
    assert (seen.views["one"].error or "").startswith(f"out of memory ({line}): lower answers.batch")


def test_work_that_a_killed_step_finished_is_kept(tmp_path: Path) -> None:
    options = {"one": {"pieces": 3, "kill": True}}
    toyrun.run(tmp_path, options, steps=toyrun.CHAIN[:1])
    code, seen = toyrun.run(tmp_path, options, steps=toyrun.CHAIN[:1])
    assert code == 2
    assert seen.said == ["one: begins at piece 3", "one: works"]
    step = RunFolder(tmp_path).steps()["one"]
    assert json.loads((step.path / "process.json").read_text())["attempt"] == 2


def test_nothing_that_a_step_forked_outlives_it(tmp_path: Path) -> None:
    code, _ = toyrun.run(tmp_path, {"one": {"fork": True, "refuse": True}}, steps=toyrun.CHAIN[:1])
    assert code == 2
    lock = RunFolder(tmp_path).steps()["one"].path / "lock"
    until = time.monotonic() + 5
    while (handle := process.try_lock(lock)) is None:
        assert time.monotonic() < until
    os.close(handle)


def test_resources_are_taken_whole(tmp_path: Path) -> None:
    steps = tuple(Step(name, "toys:work", sections=(name,), resources=("cpu",)) for name in "abc")
    code, seen = toyrun.run(tmp_path, {"a": {"sleep": 0.1}}, steps=steps)
    assert code == 0
    running = 0
    for state in seen.states:
        running += 1 if state.endswith("running") else -1
        assert running <= 1


def test_a_damaged_journal_is_named(tmp_path: Path) -> None:
    (tmp_path / "journal.sqlite3").write_bytes(b"nonsense" * 1000)
    with pytest.raises(UserError, match=r"journal\.sqlite3.*not a database.*delete it"):
        toyrun.run(tmp_path)
