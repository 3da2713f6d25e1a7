"""Progress lines."""

import json
from pathlib import Path

import pytest

from eyas.run.protocol import Follower, ProgressState, ProgressWriter, printable


def test_many_advances_are_summed_up(tmp_path: Path) -> None:
    writer = ProgressWriter(tmp_path / "p", 1)
    writer.total(10_000, "rows")
    for _ in range(10_000):
        writer.advance(1)
    writer.milestone("over")
    lines = (tmp_path / "p").read_text().splitlines()
    assert len(lines) < 20
    assert json.loads(lines[-2])["done"] == 10_000
    assert json.loads(lines[-1])["milestone"] == "over"


def test_a_follower_sees_what_was_added(tmp_path: Path) -> None:
    follower = Follower(tmp_path / "p")
    assert follower.read() == []
    writer = ProgressWriter(tmp_path / "p", 1)
    writer.total(5, "rows", done=2)
    assert len(follower.read()) == 2
    assert follower.read() == []
    assert (follower.state.done, follower.state.total, follower.state.unit) == (2, 5, "rows")


def test_a_torn_line_is_waited_for(tmp_path: Path) -> None:
    follower = Follower(tmp_path / "p")
    with (tmp_path / "p").open("a") as file:
        file.write('{"t": 1, "total": 4, "unit": "rows", "done": 0}\n{"t": 2, "do')
        file.flush()
        assert len(follower.read()) == 1
        file.write('ne": 3}\n')
    assert follower.read() == [{"t": 2, "done": 3}]


def test_a_torn_line_of_a_killed_attempt_spoils_nothing(tmp_path: Path) -> None:
    path = tmp_path / "p"
    path.write_text('{"t": 1, "total": 4, "unit": "rows", "done": 3}\n{"t": 2, "metric": {"loss": 1}}\n{"t": 3, "don')
    writer = ProgressWriter(path, 2)
    follower = Follower(path)
    follower.read()
    assert (follower.state.attempt, follower.state.done, follower.state.total) == (2, 0, None)
    assert follower.state.metrics == [{"t": 2, "loss": 1}]
    writer.milestone("goes on")
    assert follower.read()[-1]["milestone"] == "goes on"


@pytest.mark.parametrize(
    "line", ["", "[]", "3", "null", '{"t": "x"}', '{"done": 2}', '{"t": 1, "metric": 3}', "\x00\xff"]
)
def test_strange_lines_are_skipped(tmp_path: Path, line: str) -> None:
    (tmp_path / "p").write_text(f'{line}\n{{"t": 1, "done": 2}}\n')
    follower = Follower(tmp_path / "p")
    follower.read()
    assert follower.state.done == 2


def test_rate_and_time_left() -> None:
    state = ProgressState()
    assert state.rate is None
    state.take({"t": 100, "total": 100, "unit": "rows", "done": 0})
    assert state.eta(100) is None
    for second in range(1, 11):
        state.take({"t": 100 + second, "done": 2 * second})
    assert state.rate == pytest.approx(2)
    assert state.eta(110) == pytest.approx(40)
    assert state.eta(115) == pytest.approx(35)
    state.take({"t": 120, "total": 7, "unit": "steps", "done": 0})
    assert state.rate is None


def test_a_resumed_step_is_not_credited_with_what_was_done() -> None:
    state = ProgressState()
    state.take({"t": 0, "total": 100, "unit": "rows", "done": 90})
    state.take({"t": 10, "done": 95})
    assert state.rate == pytest.approx(0.5)


def test_quick_lines_do_not_push_out_the_past() -> None:
    state = ProgressState()
    for tenth in range(1000):
        state.take({"t": tenth / 10, "done": tenth / 10})
    assert state.rate == pytest.approx(1, rel=0.02)


def test_text_is_made_printable() -> None:
    assert printable("two\nlines\t\x1b[31mred") == "two lines [31mred"
    assert len(printable("x" * 1000)) == 300


def test_silence_after_advance_is_flushed(tmp_path: Path) -> None:
    writer = ProgressWriter(tmp_path / "p", 1)
    writer.total(3, "rows")
    writer.advance(1)
    writer.advance(1)
    writer.flush()
    follower = Follower(tmp_path / "p")
    follower.read()
    assert follower.state.done == 2


def test_numbers_that_are_none_are_unknown() -> None:
    state = ProgressState()
    state.take({"t": 0, "total": "x", "unit": "rows", "done": [1]})
    assert (state.total, state.done, state.eta(0)) == (None, 0, None)
