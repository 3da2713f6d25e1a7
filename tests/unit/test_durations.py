"""What is learned from the steps that were, and when a run will be done."""

import math
import random
import statistics
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import toyrun
from eyas.plan import durations, forecast
from eyas.plan.durations import Estimate, History, Kind, Row, median
from eyas.plan.forecast import Running, refined
from eyas.plan.graph import Step
from eyas.plan.schedule import State
from eyas.run.expected import here
from eyas.run.machine import Machine
from eyas.run.protocol import ProgressState

ENTRY = "eyas.train.step:run"
KIND = Kind(ENTRY, "train", "here", "1 x H200", "m")


def row(seconds: float, work: float | None = 10, **other: object) -> Row:
    whole = Row(time.time(), ENTRY, "train", "here", "b1", "1 x H200", "m", False, work, seconds, 100.0, True)
    return replace(whole, **other)  # type: ignore[arg-type]


def test_seconds_a_unit_of_work() -> None:
    history = History([row(10), row(12), row(11)])
    found = history.expect(KIND, 100)
    assert (found.seconds, found.rows, found.bytes) == (pytest.approx(110), 3, pytest.approx(1000))
    assert found.guess
    assert found.seconds < found.high < 1.5 * found.seconds
    assert History([row(11)] * 10).expect(KIND, 10).guess is False


def test_rows_of_similar_work_are_preferred() -> None:
    """What a step takes beside its work does not count twice."""
    assert History([row(30, 10), row(40, 100)]).expect(KIND, 110).seconds == pytest.approx(44)


def test_the_closest_rows_are_taken() -> None:
    rows = [
        row(1),
        row(2, name="pilot-train"),
        row(3, host="elsewhere"),
        row(4, host="elsewhere", model="other"),
        row(5, host="elsewhere", model="other", device="cpu x 2"),
    ]
    spreads = []
    for number, wanted in enumerate([1, 2, 3, 4]):
        found = History(rows[number:]).expect(KIND, 10)
        assert found.seconds == wanted
        spreads.append(found.spread)
    assert spreads == sorted(spreads)
    guess = History(rows[4:]).expect(KIND, 10)
    assert (guess.rows, guess.seconds) == (0, pytest.approx(5.022))
    assert History([]).expect(replace(KIND, entry="x:y"), None).seconds == durations.UNKNOWN


def test_failures_are_lower_bounds() -> None:
    """A step that failed after 30 s takes more than 30 s: it does not make the estimate smaller."""
    done = [row(10), row(20), row(30)]
    failed = row(25, finished=False)
    assert History(done).expect(KIND, 10).seconds == 20
    assert History([*done, failed]).expect(KIND, 10).seconds > 20
    assert History([*done, row(1, finished=False)]).expect(KIND, 10).seconds == 20
    assert History([row(5, finished=False)]).expect(KIND, 10).rows == 0


@given(st.lists(st.floats(0.1, 1e6), min_size=1, max_size=30))
def test_without_failures_the_median_is_the_median(values: list[float]) -> None:
    assert median([(value, True) for value in values]) == pytest.approx(statistics.median(values))


@given(st.lists(st.tuples(st.floats(0.1, 1e6), st.booleans()), min_size=1, max_size=30))
def test_failures_never_lower_the_median(values: list[tuple[float, bool]]) -> None:
    if finished := [value for value, done in values if done]:
        assert median(values) >= statistics.median_low(finished) - 1e-9


def test_a_load_is_learned_from_other_servers_of_the_model() -> None:
    load = Kind("s:serve_drafted", "drafted", "here", "1 x H200", "m", warm=True)
    rows = [row(540, None, entry="s:serve", name="server"), row(60, None, entry="s:serve", name="server", warm=True)]
    assert History(rows).expect(load, None).seconds == 60
    assert History(rows[:1]).expect(load, None).seconds == 540


def test_milestones_tell_how_far_a_load_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A load that said "weights loaded" after 60 of 80 s: one that says so after 120 s will take 160 s."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    plan = toyrun.plan({}, toyrun.SERVED, toyrun.WEB)
    machine = Machine("here", "b1", "1 x H200", "m")
    first = ProgressState()
    for line in ({"t": 0.0, "attempt": 1}, {"t": 60.0, "milestone": "weights loaded (812 GB)"}):
        first.take(line)
    web = plan.service("web")
    assert here(plan, machine).record(web, 80.0, True, progress=first) is None
    later = ProgressState()
    later.take({"t": 1000.0, "attempt": 1})
    expected = here(plan, machine)
    assert expected.share(web, later, 1100.0) is None
    later.take({"t": 1120.0, "milestone": "weights loaded (907 GB)"})
    assert expected.share(web, later, 1120.0) == pytest.approx(0.75)
    told = refined(expected.service(web), Running(140.0, expected.share(web, later, 1140.0)))
    assert 130 < told.seconds < 160


def test_a_warm_load_is_learned_apart() -> None:
    load = Kind("s:serve", "server", "here", "1 x H200", "m")
    rows = [row(540, None, entry="s:serve", name="server"), row(60, None, entry="s:serve", name="server", warm=True)]
    assert History(rows).expect(load, None).seconds == 540
    assert History(rows).expect(replace(load, warm=True), None).seconds == 60
    assert History(rows).warm("here", "b1", "m", {"s:serve"})
    assert not History(rows).warm("here", "b2", "m", {"s:serve"})


def test_the_file_of_a_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert durations.read().expect(KIND, 10).rows == 0
    durations.add(row(7))
    durations.add(row(9, None, finished=False))
    assert durations.place() == tmp_path / "state" / "eyas" / "durations.sqlite3"
    assert durations.read().expect(KIND, 10).seconds == 7
    durations.place().write_bytes(b"nonsense" * 1000)
    assert durations.read().expect(KIND, 10).rows == 0


def test_a_history_that_cannot_be_kept_fails_no_run(
    toys: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    code, seen = toyrun.run(tmp_path / "run", steps=toyrun.CHAIN[:1])
    assert code == 0
    assert any("durations are not kept" in note for note in seen.notes)


def test_progress_says_more_the_further_it_is() -> None:
    """A step that takes twice as long as expected: what is expected of the whole comes nearer and surer."""
    expected = Estimate(100.0, 0.3, 10)
    seen = [refined(expected, Running(200.0 * share, share)) for share in (0.01, 0.1, 0.5, 0.9)]
    assert seen[0] == expected
    assert [one.seconds for one in seen] == sorted(one.seconds for one in seen)
    assert seen[-1].seconds == pytest.approx(200, rel=0.05)
    assert [one.spread for one in seen] == sorted((one.spread for one in seen), reverse=True)
    assert refined(expected, Running(50.0)) == expected


def test_what_takes_longer_than_expected_is_not_done_at_once() -> None:
    late = Estimate(100.0, 0.3, 10)
    assert late.at(0.5) == pytest.approx(100)
    assert late.at(0.5, above=150) > 150
    assert late.at(0.05, above=500) > 500


def test_the_range_of_a_run() -> None:
    """Nine tenths of runs whose steps vary as assumed end within it."""
    plan = toyrun.plan({})
    estimates = {planned.name: Estimate(100.0, 0.2, 20) for planned in plan.steps}
    found = forecast.make(plan, estimates, {}, State(), {}, {})
    assert (found.seconds, found.guess) == (pytest.approx(300), False)
    assert found.low < 300 < found.high
    assert found.chain == ["one", "two", "export"]
    assert found.alone == pytest.approx(400)
    dice, inside = random.Random(1), 0
    for _ in range(400):
        shared, own = 0.2 * forecast.COMMON**0.5 * dice.gauss(0, 1), 0.2 * (1 - forecast.COMMON) ** 0.5
        took = [100 * math.exp(shared + own * dice.gauss(0, 1)) for _ in range(3)]
        inside += found.low <= sum(took) <= found.high
    assert 0.85 <= inside / 400 <= 0.95


def test_a_running_step_shortens_what_is_left() -> None:
    plan = toyrun.plan({}, (Step("one", "toys:work"), Step("two", "toys:work", ("one",))))
    estimates = {"one": Estimate(100.0, 0.1, 20), "two": Estimate(50.0, 0.1, 20)}
    state = State(running={"one"})
    found = forecast.make(plan, estimates, {}, state, {"one": Running(60.0, 0.6)}, {})
    assert found.seconds == pytest.approx(90, rel=0.05)
