"""Any graph is run in the order of its needs, each step once, and nothing after a failure that it depends on."""

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from hypothesis import given, settings
from hypothesis import strategies as st

import toyrun
from eyas.plan.graph import Step
from eyas.run import executor, outlook, process, session


@st.composite
def graphs(draw: st.DrawFn) -> tuple[tuple[Step, ...], set[str]]:
    count = draw(st.integers(1, 7))
    steps = []
    for number in range(count):
        needs = draw(st.sets(st.sampled_from([f"s{n}" for n in range(number)]))) if number else set()
        resources = draw(st.sets(st.sampled_from(["cpu", "gpu"])))
        steps.append(Step(f"s{number}", "toys:work", needs=tuple(sorted(needs)), resources=tuple(sorted(resources))))
    failing = draw(st.sets(st.sampled_from([step.name for step in steps]), max_size=2))
    return tuple(draw(st.permutations(steps))), failing


class Instant:
    """In place of a child process: ends at the second look, having written what a step writes."""

    def __init__(self, folder: Path, name: str, failing: set[str]) -> None:
        self.folder, self.name, self.failing, self.looks = folder, name, failing, 0
        self.who, self.popen = {"pid": 0}, None

    def running(self) -> bool:
        self.looks += 1
        return self.looks < 2

    def exit(self) -> dict[str, Any]:
        if self.name in self.failing:
            return {"code": 2, "error": "refused"}
        out = self.folder / "out"
        out.mkdir()
        (out / "result.json").write_text("{}")
        (out / "outputs.json").write_text(json.dumps({"files": {}}))
        return {"code": 0}


@settings(max_examples=25, deadline=None)
@given(graphs())
def test_graphs_run_in_order_and_once(drawn: tuple[tuple[Step, ...], set[str]]) -> None:
    steps, failing = drawn
    started: list[str] = []

    def start(folder: Path, name: str, *flags: str) -> Instant:
        needs = next(step.needs for step in steps if step.name == name)
        assert all(
            (Path(out) / "outputs.json").exists()
            for out in json.loads((folder / "spec.json").read_text())["inputs"].values()
        )
        assert all(seen.views[need].state == "finished" for need in needs)
        taken = [r for s in steps if seen.views[s.name].state == "running" for r in s.resources]
        assert not set(taken) & set(next(step.resources for step in steps if step.name == name))
        started.append(name)
        return Instant(folder, name, failing)

    seen = toyrun.Recorder()
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(process, "start", start),
        mock.patch.object(process, "end"),
        mock.patch.object(executor, "TICK_SECONDS", 0),
        mock.patch.object(outlook, "DRAWS", 1),
        mock.patch.object(session, "report", return_value=[]),
    ):
        code = session.run(Path(folder) / "run", toyrun.plan({}, steps), {"name": "run"}, seen).code
    needs = {step.name: set(step.needs) for step in steps}
    lost = set(failing)
    while more := {name for name in needs if needs[name] & lost} - lost:
        lost |= more
    assert len(started) == len(set(started))
    assert set(started) == {name for name in needs if not needs[name] & lost}
    assert code == (2 if failing else 0)
    assert all(view.state == "finished" for view in seen.views.values() if view.name not in lost)


@given(graphs(), st.data())
def test_what_runs_has_its_inputs_and_a_reader(drawn: tuple[tuple[Step, ...], set[str]], data: st.DataObject) -> None:
    steps, products = drawn
    steps = tuple(replace(step, product=step.name in products) for step in steps)
    sound = data.draw(st.sets(st.sampled_from([step.name for step in steps])))
    needed = toyrun.plan({}, steps).needed(sound)
    readers = {step.name: {other.name for other in steps if step.name in other.needs} for step in steps}
    runs = needed - sound
    assert all(set(step.needs) <= needed for step in steps if step.name in runs)
    assert needed == {
        step.name for step in steps if step.product or not readers[step.name] or readers[step.name] & runs
    }
