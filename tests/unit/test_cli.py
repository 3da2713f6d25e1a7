"""The commands, called as the console script calls them."""

import json
import os
import subprocess
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import toyrun
from eyas import __version__, cli
from eyas.errors import UserError
from eyas.plan import graph
from eyas.plan.graph import Step

Eyas = Callable[..., tuple[int, str, str]]


@pytest.fixture
def eyas(
    toys: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Runs a command in an empty folder, with toy steps; gives exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(graph, "build", lambda config: (Step("one", "toys:work"), Step("two", "toys:work", ("one",))))
    (tmp_path / "toy.yaml").write_text("name: toy\ntarget: {model: m}\n")

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["eyas", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        said = capfd.readouterr()
        return int(ended.value.code or 0), said.out, said.err

    return call


def test_plan_run_status(eyas: Eyas, tmp_path: Path) -> None:
    code, out, _ = eyas("plan", "toy.yaml")
    assert code == 0
    assert out.count("would run (first time)") == 2
    assert not (tmp_path / "runs").exists()
    code, out, err = eyas("run", "toy.yaml")
    assert (code, err) == (0, "")
    assert "two: finished in" in out
    assert "toy: finished, without a verdict" in out
    code, out, _ = eyas("run", "toy.yaml")
    assert "two: finished before, reused" in out
    code, out, _ = eyas("plan", "toy.yaml")
    assert out.count("finished, reused") == 2
    assert "--probe nothing.json: no such file" in eyas("plan", "toy.yaml", "--probe", "nothing.json")[2]
    code, out, _ = eyas("plan", "toy.yaml", "seed=3")
    assert out.count("would run (changed: ") == 2
    assert "Expected: " in out
    code, out, _ = eyas("status", "toy", "--json")
    state = json.loads(out)
    assert [step["state"] for step in state["steps"]] == ["finished", "finished"]
    assert (state["runner"]["running"], state["ahead"]) == (False, None)
    code, out, _ = eyas("status", "runs/toy")
    assert "one           finished" in out
    assert (tmp_path / "runs" / "toy" / "run.yaml").read_text().startswith("name: toy\nseed: 0\n")


def test_edited_code_alone_discards_nothing_unasked(
    eyas: Eyas, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.syspath_prepend(tmp_path)
    own = tmp_path / "edited_toy.py"
    own.write_text("from toys import work\n")
    steps = (Step("one", "edited_toy:work"), Step("two", "toys:work", ("one",)))
    monkeypatch.setattr(graph, "build", lambda config: steps)
    assert eyas("run", "toy.yaml")[0] == 0
    own.write_text("from toys import work  # edited\n")
    assert eyas("plan", "toy.yaml")[1].count("would run") == 2, "what takes less than a minute is not asked about"
    monkeypatch.setattr("eyas.run.keep.ASK_SECONDS", 0)
    code, out, _ = eyas("plan", "toy.yaml")
    assert out.count("finished, reused") == 2
    assert "the code of one changed, nothing else: --redo runs again one (" in out
    code, out, err = eyas("run", "toy.yaml")
    assert (code, out) == (2, "")
    assert "--keep one keeps what is finished" in err
    code, out, _ = eyas("run", "toy.yaml", "--keep", "one")
    assert (code, out.count("finished before, reused")) == (0, 2)
    code, out, _ = eyas("run", "toy.yaml")
    assert (code, out.count("finished before, reused")) == (0, 2), "nobody is asked twice"
    code, _, err = eyas("run", "toy.yaml", "--keep", "three")
    assert (code, "--keep three: no such step" in err) == (2, True)
    code, out, _ = eyas("run", "toy.yaml", "--redo")
    assert (code, out.count(": running")) == (0, 2)
    steps = (Step("one", "edited_toy:work", sections=("train",)), steps[1])
    own.write_text("from toys import work  # edited again\n")
    assert eyas("plan", "toy.yaml")[1].count("would run") == 2, "more than the code has changed"


def test_user_errors_are_one_line(eyas: Eyas) -> None:
    for arguments, text in (
        (["run", "none.yaml"], "none.yaml: cannot read the run file"),
        (["run", "toy.yaml", "trian.epochs=3"], "unknown key trian; did you mean train?"),
        (["status", "nothing"], "nothing is no run folder"),
        (["report", "nothing"], "nothing is no run folder"),
    ):
        code, out, err = eyas(*arguments)
        assert (code, out) == (2, "")
        assert err.startswith("eyas: ")
        assert text in err
        assert err.count("\n") == 1


def test_usage(eyas: Eyas) -> None:
    assert eyas("--version")[:2] == (0, f"eyas {__version__}\n")
    assert eyas("--help")[0] == 0
    assert eyas("run")[0] == 2
    assert eyas("frobnicate")[0] == 2


def test_a_failed_step_sets_the_exit_code(eyas: Eyas, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph, "build", lambda config: (Step("bad", "toys:nothing"),))
    code, out, _ = eyas("run", "toy.yaml", "--plain", "--runs", "elsewhere")
    assert code == 1
    assert "bad: failed: AttributeError: module 'toys' has no attribute 'nothing'; log: elsewhere/toy/steps/bad/" in out
    code, out, _ = eyas("status", "elsewhere/toy")
    assert "bad           failed" in out
    assert "AttributeError" in out


def test_replay_calls_the_decoder(eyas: Eyas, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def predict(**how: Any) -> dict[str, Any]:
        asked.update(how)
        how["progress"].milestone("loading")
        return {"accept_length": 1.5, "rounds": 10, "draft_tokens": 2}

    module = types.SimpleNamespace(predict=predict)
    monkeypatch.setitem(sys.modules, "eyas.decode", types.ModuleType("eyas.decode"))
    monkeypatch.setitem(sys.modules, "eyas.decode.predict", module)  # type: ignore[arg-type]
    code, out, err = eyas("replay", "draft", "--target", "model", "--draft-tokens", "2", "--json")
    assert (code, err) == (0, "loading\n")
    assert json.loads(out)["accept_length"] == 1.5
    del asked["progress"]
    given = {"draft": Path("draft"), "target": "model", "draft_tokens": 2}
    assert asked == {**given, "prompts": None, "limit": None, "max_new_tokens": None}
    code, out, _ = eyas("replay", "draft", "--target", "model")
    assert "Accept length  1.50" in out
    assert eyas("replay", "draft")[0] == 2

    def without_torch(**how: Any) -> dict[str, Any]:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    module.predict = without_torch
    code, _, err = eyas("replay", "draft", "--target", "model")
    assert (code, err) == (2, "eyas: torch is not installed: pip install 'eyas[train]'\n")

    def without_memory(**how: Any) -> dict[str, Any]:
        raise ImportError("libtorch_cpu.so: failed to map segment from shared object", name="torch._C")

    module.predict = without_memory
    code, _, err = eyas("replay", "draft", "--target", "model")
    assert (code, err) == (2, "eyas: out of memory: end other programs and run the same command again\n")


def test_a_fault_keeps_its_traceback(eyas: Eyas, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(config: Any) -> Any:
        raise ZeroDivisionError("ours")

    monkeypatch.setattr(graph, "build", broken)
    with pytest.raises(ZeroDivisionError, match="ours"):
        eyas("plan", "toy.yaml")


def test_help_answers_at_once() -> None:
    best = min(_seconds("-m", "eyas", "--help") for _ in range(3))
    assert best < 0.5 + _seconds("-c", "pass")
    assert _seconds("-c", "import eyas") < 0.5 + _seconds("-c", "pass")


def _seconds(*arguments: str) -> float:
    begun = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, capture_output=True)
    return time.perf_counter() - begun


def test_a_report_that_cannot_be_built_does_not_spoil_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, toys: None
) -> None:
    from eyas.run import session

    monkeypatch.undo()
    monkeypatch.setenv("PYTHONPATH", str(Path(toyrun.__file__).parent), prepend=os.pathsep)
    monkeypatch.setitem(sys.modules, "eyas.report", None)  # type: ignore[arg-type]
    outcome = session.run(tmp_path / "run", toyrun.plan({}, toyrun.CHAIN[:1]), {"name": "run"}, toyrun.Recorder())
    assert outcome.code == 0
    assert outcome.notes[0].startswith("no report.html (")

    def no_plots(folder: Path) -> Path:
        raise ModuleNotFoundError("No module named 'matplotlib'", name="matplotlib")

    monkeypatch.setitem(sys.modules, "eyas.report", types.SimpleNamespace(build=no_plots))  # type: ignore[arg-type]
    assert "pip install 'eyas[report]'" in session.report(tmp_path / "run", strict=False)[0]
    with pytest.raises(UserError, match=r"eyas\[report\]"):
        session.report(tmp_path / "run")
