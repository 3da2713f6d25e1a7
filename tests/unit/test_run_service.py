"""Services: a tiny web server that steps lease."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import toyrun
from eyas.plan.graph import Step
from eyas.run import process
from eyas.run.folder import RunFolder

pytestmark = pytest.mark.usefixtures("toys")

WEB = (Step("web", "toys:serve", sections=("service",)),)
STEPS = (
    Step("first", "toys:ask", sections=("first",), leases=("web",)),
    Step("second", "toys:ask", needs=("first",), sections=("second",), leases=("web",)),
)


def services(folder: Path) -> list[Path]:
    return list((folder / "services" / "web").iterdir())


def test_a_service_is_leased_shared_and_ended(tmp_path: Path) -> None:
    code, seen = toyrun.run(tmp_path, steps=STEPS, services=WEB)
    assert code == 0
    results = [step.result() for step in RunFolder(tmp_path).steps().values()]
    assert [result["answer"] for result in results] == ["hello", "hello"]
    assert results[0]["pid"] == results[1]["pid"]
    (folder,) = services(tmp_path)
    assert not process.alive(process.who_runs(folder))
    code, seen = toyrun.run(tmp_path, steps=STEPS, services=WEB)
    assert (code, seen.ran()) == (0, [])
    assert json.loads((folder / "process.json").read_text())["attempt"] == 1  # Nobody needed it.


def test_a_dead_service_is_started_again_with_its_step(tmp_path: Path) -> None:
    code, _ = toyrun.run(tmp_path, {"first": {"die": 1}}, steps=STEPS[:1], services=WEB)
    assert code == 0
    assert RunFolder(tmp_path).steps()["first"].result()["died"] == 1


def test_a_service_that_keeps_dying_fails_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eyas.run.service.RESTARTS", 1)
    code, seen = toyrun.run(tmp_path, {"first": {"die": 9}}, steps=STEPS[:1], services=WEB)
    assert code == 2
    assert "service web died 2 times, at last: first lost it: ended without a word; log: " in (
        seen.views["first"].error or ""
    )


def test_a_service_that_ended_for_good_is_not_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process.Child, "exit", _refusing(process.Child.exit))
    code, seen = toyrun.run(tmp_path, {"first": {"die": 9}}, steps=STEPS[:1], services=WEB)
    assert (code, seen.views["first"].error) == (2, "service web: out of memory")
    (folder,) = services(tmp_path)
    assert json.loads((folder / "process.json").read_text())["attempt"] == 1


def _refusing(how: Callable[[process.Child], dict[str, Any]]) -> Callable[[process.Child], dict[str, Any]]:
    def ended(child: process.Child) -> dict[str, Any]:
        return {"code": 2, "error": "out of memory"} if "services" in child.folder.parts else how(child)

    return ended


@pytest.mark.parametrize(
    ("options", "text"),
    [({"refuse": True}, "service web: port taken"), ({"crash": True}, "ZeroDivisionError: no server today; log: ")],
)
def test_a_service_that_never_answers_fails_the_step(tmp_path: Path, options: dict[str, bool], text: str) -> None:
    code, seen = toyrun.run(tmp_path, {"service": options}, steps=STEPS[:1], services=WEB)
    assert code == 2
    assert text in (seen.views["first"].error or "")


def test_editing_a_service_runs_its_steps_again(tmp_path: Path) -> None:
    before = toyrun.plan({}, STEPS, WEB)
    after = toyrun.plan({"service": {"port": 1}}, STEPS, WEB)
    assert before.steps[0].digest != after.steps[0].digest
