"""A run seen from another terminal, while it goes on and later."""

import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from rich.console import Console

import toyrun
from eyas.errors import UserError
from eyas.run.folder import RunFolder, StepFolder
from eyas.run.view import View
from eyas.ui import bars
from eyas.ui.live import Live
from eyas.ui.overview import as_text, print_lines, read_status
from eyas.ui.watch import Onlooker, watch

pytestmark = pytest.mark.usefixtures("toys")


def test_a_run_is_watched_until_its_end(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    gate = tmp_path / "gate"
    config = {"judged": {"wait_for": str(gate)}}
    command = [sys.executable, toyrun.__file__, str(tmp_path / "run"), json.dumps(config), "served"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as runner:
        until = time.monotonic() + 20
        while (
            not (tmp_path / "run" / "forecast.json").exists()
            or read_status(tmp_path / "run")["steps"][1]["state"] != "running"
        ):
            assert time.monotonic() < until
            time.sleep(0.05)
        status = read_status(tmp_path / "run")
        assert status["ahead"]["chain"][-1] == "judged"
        assert "done in " in as_text(status)
        threading.Timer(1, gate.touch).start()
        seen = toyrun.Recorder()
        watch(tmp_path / "run", seen)
        assert runner.wait(10) == 0
    assert (
        seen.states == ["asked finished", "judged running", "judged finished"] or seen.states[-1] == "judged finished"
    )
    assert seen.looked[0].chain[-1] == "judged"
    onlooker = Onlooker(tmp_path / "run")
    onlooker.look()
    assert [view.name for view in onlooker.services] == ["web"]
    assert all(view.planned for view in onlooker.steps)
    later = toyrun.Recorder()
    watch(tmp_path / "run", later)
    assert later.looked == []
    assert later.states == ["asked finished", "judged finished"]
    print_lines(tmp_path / "run")
    assert json.loads(capfd.readouterr().out)["steps"][1]["state"] == "finished"


def test_only_a_run_can_be_watched(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is no run folder"):
        watch(tmp_path, toyrun.Recorder())


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"now": 3}', '{"now": {"end": "x"}}', '{"first": {"steps": [1]}}'])
def test_a_damaged_forecast_counts_as_absent(tmp_path: Path, text: str) -> None:
    toyrun.run(tmp_path)
    RunFolder(tmp_path).forecast.write_text(text)
    seen = toyrun.Recorder()
    watch(tmp_path, seen)
    assert seen.looked == []


def view(name: str, **times: object) -> View:
    return View(name, StepFolder(Path("/nowhere")), **times)  # type: ignore[arg-type]


def test_what_was_planned_stands_behind_what_came() -> None:
    now = 60.0
    late = view("late", state="running", began=0.0, planned=(0.0, 40.0), coming=(60.0, 80.0))
    done = view("done", state="finished", began=0.0, ended=20.0, planned=(0.0, 40.0))
    axis = bars.Axis(span for one in (late, done) for span in bars.spans(one, now))
    assert bars.bar(late, axis, 8, now, False, "cyan").plain == "██████▒▒"
    assert bars.bar(done, axis, 8, now, False, "green").plain == "██░░    "
    assert bars.bar(done, axis, 8, now, True, "green").plain == "##--    "


def test_long_gaps_are_drawn_short() -> None:
    axis = bars.Axis([(0.0, 10.0), (1000.0, 1010.0)])
    assert axis.place(10.0) == pytest.approx(10 / 22)
    assert axis.place(1000.0) == pytest.approx(12 / 22)
    assert axis.place(5000.0) == 1.0
    assert bars.Axis([]).place(3.0) == 0.0


def test_services_are_rows_of_the_live_table() -> None:
    console = Console(width=120, force_terminal=True, no_color=True)
    live = Live(console)
    now = time.time()
    live._views = [view("answers", planned=(now, now + 60), coming=(now + 10, now + 60), critical=True)]
    live._services = [view("server", state="running", began=now - 5, coming=(now - 5, now + 10)), view("drafted")]
    with console.capture() as capture:
        console.print(live.table())
    text = capture.get()
    assert "load server" in text
    assert "drafted" not in text
    assert "▒" in text
