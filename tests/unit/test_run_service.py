"""Services: a tiny web server that steps lease."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import toyrun
from eyas.files import read_json
from eyas.plan.graph import Step
from eyas.run import lock, process
from eyas.run.folder import RunFolder
from eyas.run.journal import events
from toyrun import SERVED, WEB

pytestmark = pytest.mark.usefixtures("toys")

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


def test_a_second_server_takes_the_place_of_the_first(tmp_path: Path) -> None:
    """A step that waits for a service keeps it up only if nothing before it leases another one."""
    lease = {"entry": "toys:work", "resources": ("cpu",)}
    steps = (
        Step("first", leases=("web",), **lease),
        Step("middle", needs=("first",), leases=("other",), **lease),
        Step("last", needs=("middle",), leases=("web",), **lease),
    )
    code, _ = toyrun.run(tmp_path, steps=steps, services=(*WEB, Step("other", "toys:serve", sections=("service",))))
    assert code == 0
    (web,), (other,) = services(tmp_path), list((tmp_path / "services" / "other").iterdir())
    attempts = [read_json(folder / process.NOW)["attempt"] for folder in (web, other)]
    assert attempts == [2, 1]


def test_a_step_that_measures_runs_alone(tmp_path: Path) -> None:
    steps = (Step("first", "toys:work"), Step("measured", "toys:work", alone=True), Step("second", "toys:work"))
    code, seen = toyrun.run(tmp_path, steps=steps)
    assert code == 0
    at = {text: number for number, text in enumerate(seen.states)}
    for other in ("first", "second"):
        apart = at[f"{other} finished"] < at["measured running"] or at["measured finished"] < at[f"{other} running"]
        assert apart, seen.states


def test_a_step_that_measures_waits_for_the_services_of_others(tmp_path: Path) -> None:
    """It may start a server of its own; while another's is loading, the device and the times are not its own."""
    lease = {"leases": ("web",), "alone": True}
    steps = (Step("leasing", "toys:work", **lease), Step("own", "toys:work", alone=True))
    code, seen = toyrun.run(tmp_path, steps=steps, services=WEB)
    assert (code, seen.ran()) == (0, ["leasing", "own"])


def test_no_service_is_kept_up_over_a_step_that_measures_without_it(tmp_path: Path) -> None:
    steps = (
        Step("first", "toys:work", leases=("web",)),
        Step("own", "toys:work", needs=("first",), alone=True),
        Step("last", "toys:work", needs=("own",), leases=("web",)),
    )
    code, seen = toyrun.run(tmp_path, steps=steps, services=WEB)
    assert (code, seen.ran()) == (0, ["first", "own", "last"])


def test_a_step_reads_its_needs_and_leases_by_their_roles(tmp_path: Path) -> None:
    steps = (
        Step("small-one", "toys:work"),
        Step(
            "two", "toys:work", needs=("small-one",), leases=("web",), roles=(("small-one", "one"), ("web", "server"))
        ),
    )
    assert toyrun.run(tmp_path, steps=steps, services=WEB)[0] == 0
    (folder,) = (tmp_path / "steps" / "two").iterdir()
    asked = read_json(folder / "spec.json")
    assert (list(asked["inputs"]), list(asked["services"])) == (["one"], ["server"])
    assert Path(asked["inputs"]["one"]).parts[-3] == "small-one"


def test_a_service_loads_while_what_its_step_needs_is_made(tmp_path: Path) -> None:
    """The step before the leasing one ends only once the service has answered."""
    web = f"{tmp_path}/services/web/{toyrun.plan({}, SERVED, WEB).service('web').digest}/ready.json"
    steps = (
        Step("made", "toys:work", sections=("made",)),
        Step("asked", "toys:ask", needs=("made",), sections=("asked",), leases=("web",)),
    )
    assert toyrun.run(tmp_path, {"made": {"wait_for": web}}, steps=steps, services=WEB)[0] == 0


def test_a_service_does_not_load_beside_a_step_that_takes_its_device(tmp_path: Path) -> None:
    web = (Step("web", "toys:serve", sections=("service",), resources=("gpu",)),)
    steps = (
        Step("trained", "toys:work", sections=("trained",), resources=("gpu",)),
        Step("asked", "toys:ask", needs=("trained",), sections=("asked",), leases=("web",), resources=("gpu",)),
    )
    code, _ = toyrun.run(tmp_path, steps=steps, services=web)
    assert code == 0
    told = [event["step"] + " " + event["state"] for event in events(tmp_path / "journal.sqlite3")]
    assert told.index("trained finished") < told.index("web loading") < told.index("asked running")


def test_a_dead_service_that_nobody_uses_yet_is_started_again(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    steps = (
        Step("made", "toys:work", sections=("made",)),
        Step("asked", "toys:ask", needs=("made",), sections=("asked",), leases=("web",)),
    )
    code = (
        "import glob, json, os, sys, time\n"
        "while not (found := glob.glob(sys.argv[1] + '/run/services/web/*/ready.json')): time.sleep(0.02)\n"
        "os.kill(json.load(open(found[0]))['pid'], 9)\n"
        "while os.path.exists(found[0]): time.sleep(0.02)\n"
        "open(sys.argv[1] + '/gate', 'w')"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)]):
        result, _ = toyrun.run(tmp_path / "run", {"made": {"wait_for": str(gate)}}, steps=steps, services=WEB)
    assert result == 0
    (folder,) = services(tmp_path / "run")
    assert read_json(folder / process.NOW)["attempt"] == 2


def test_a_service_outlives_a_failure_for_a_while(tmp_path: Path) -> None:
    began = time.monotonic()
    code, seen = toyrun.run(tmp_path, {"judged": {"refuse": True}}, hold=1.0, steps=SERVED, services=WEB)
    assert (code, time.monotonic() - began > 1) == (2, True)
    assert any(note.startswith("web stays up until ") for note in seen.notes)
    (folder,) = services(tmp_path)
    assert not process.alive(process.who_runs(folder))


def test_the_next_runner_takes_the_service_that_is_held(tmp_path: Path) -> None:
    config = json.dumps({"judged": {"refuse": True}})
    command = [sys.executable, toyrun.__file__, str(tmp_path), config, "served", "60"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as first:
        until = time.monotonic() + 20
        while not lock.owner(tmp_path).get("holding"):
            assert time.monotonic() < until
            time.sleep(0.05)
        (folder,) = services(tmp_path)
        held = process.who_runs(folder)
        code, seen = toyrun.run(tmp_path, steps=SERVED, services=WEB)
        assert first.wait(10) == 2
    assert (code, seen.ran()) == (0, ["judged"])
    assert process.who_runs(folder) == held
    assert not process.alive(held)


def test_a_held_service_is_ended_by_ctrl_c(tmp_path: Path) -> None:
    command = [sys.executable, toyrun.__file__, str(tmp_path), json.dumps({"judged": {"crash": True}}), "served", "60"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as first:
        until = time.monotonic() + 20
        while not lock.owner(tmp_path).get("holding"):
            assert time.monotonic() < until
            time.sleep(0.05)
        first.send_signal(signal.SIGINT)
        assert first.wait(10) == 1
    (folder,) = services(tmp_path)
    assert not process.alive(process.who_runs(folder))
