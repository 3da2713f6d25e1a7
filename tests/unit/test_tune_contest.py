"""NCCL settings in the stand-alone all-reduce: the rounds against made-up times, the processes with gloo."""

import dataclasses
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from eyas.bench.tune import contest
from eyas.bench.tune.contest import Env, Group, Times, play
from eyas.errors import UserError
from eyas.progress import Silent

GLOO = Group(sys.executable, dict(os.environ), 2, (576, 2304), "float32", backend="gloo")


class Played:
    """All-reduces whose seconds are made up; a text in place of a speed is a failure."""

    def __init__(self, speeds: dict[tuple[str, str], float | str]) -> None:
        self.speeds, self.ran = speeds, list[tuple[Env, int]]()
        self.random = random.Random(0)

    def __call__(self, env: Env, repeats: int) -> Times:
        self.ran.append((env, repeats))
        seconds = 1e-5
        for pair in env.items():
            found = self.speeds.get(pair, 1.0)
            if isinstance(found, str):
                raise UserError(found)
            seconds /= found
        return [[size * seconds * self.random.lognormvariate(0, 0.01) for _ in range(repeats)] for size in (1, 2)]


CANDIDATES: list[Env] = [{"P": "a"}, {"P": "b"}, {"Q": "a"}, {"Q": "b"}, {"R": "a"}, {"R": "b"}]


def test_the_slower_half_drops_out_and_winners_are_combined(tmp_path: Path) -> None:
    run = Played({("P", "a"): 1.3, ("Q", "b"): 1.2, ("R", "a"): 0.5, ("R", "b"): "hung: no end within 1 s"})
    found = play(CANDIDATES, run, tmp_path / "contest", Silent())
    assert found["best"] == [{"P": "a", "Q": "b"}, {"P": "a"}]
    by_round = [[row["name"] for row in found["rows"] if row["round"] == number] for number in (1, 2, 3)]
    assert by_round[0] == ["default", *(f"{name}={value}" for env in CANDIDATES for name, value in env.items())]
    assert set(by_round[1]) <= {"default", "P=a", "P=b", "Q=a", "Q=b"}
    assert len(by_round[1]) <= 1 + 3
    assert "P=a, Q=b" not in by_round[1]
    assert by_round[2][-1] == "P=a, Q=b"
    (failed,) = (row for row in found["rows"] if row["failed"])
    assert (failed["name"], failed["failed"], failed["ratio"]) == ("R=b", "hung: no end within 1 s", None)
    assert [repeats for env, repeats in run.ran if env == {"P": "a"}] == [10, 20, 40]


def test_nothing_faster_than_its_own_choice_is_no_winner(tmp_path: Path) -> None:
    found = play(CANDIDATES, Played({("P", "a"): 0.9, ("Q", "a"): 0.8}), tmp_path, Silent())
    assert found["best"] == [] or found["rows"][-1]["ratio"]["low"] < 1.02


def test_finished_runs_are_not_repeated(tmp_path: Path) -> None:
    first = Played({("P", "a"): 1.3, ("R", "b"): "fails"})
    found = play(CANDIDATES, first, tmp_path, Silent())
    second = Played({})
    assert play(CANDIDATES, second, tmp_path, Silent()) == found
    assert second.ran == []


def test_where_its_own_choice_fails_there_is_nothing_to_compare_and_it_is_tried_again(tmp_path: Path) -> None:
    def broken(env: Env, repeats: int) -> Times:
        raise UserError("rank 1: no such device")

    with pytest.raises(UserError, match=r"NCCL's own choice fails .*: rank 1: no such device"):
        play(CANDIDATES, broken, tmp_path, Silent())
    assert play([], Played({}), tmp_path, Silent())["best"] == []


def test_two_processes_reduce(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contest, "ROUNDS", 1)
    found = play([{"EYAS_NOTHING": "1"}], GLOO.run, tmp_path, Silent())
    assert [row["failed"] for row in found["rows"][:2]] == [None, None]
    assert [len(row["microseconds"]) for row in found["rows"]] == [2] * len(found["rows"])
    assert all(one > 0 for row in found["rows"] for one in row["microseconds"])


def test_a_run_that_fails_or_hangs_has_a_cause() -> None:
    with pytest.raises(UserError, match=r"rank .: AttributeError: module 'torch' has no attribute 'float31'"):
        dataclasses.replace(GLOO, dtype="float31").run({}, 1)
    with pytest.raises(UserError, match=r"hung: no end within 0\.2 s"):
        dataclasses.replace(GLOO, seconds=0.2).run({}, 1)
    with pytest.raises(UserError, match="nowhere is not there"):
        dataclasses.replace(GLOO, python="nowhere").run({}, 1)


def test_a_sum_that_is_wrong_is_a_failure(tmp_path: Path) -> None:
    code = "import torch.distributed as d; d.all_reduce = lambda message: message.add_(1)"
    folder = Path(contest.allreduce.__file__).parent
    program = f"import sys; sys.path.insert(0, {str(folder)!r}); {code}; import allreduce; allreduce.main()"
    assert "WrongSum" in _wrong(program, tmp_path / "rendezvous")


def _wrong(program: str, rendezvous: Path) -> str:
    """Stderr of one rank alone whose all-reduce is another function."""
    orders = json.dumps(
        {"backend": "gloo", "rendezvous": str(rendezvous), "elements": [4], "dtype": "float32", "first": 0}
    )
    env = {**os.environ, "RANK": "0", "WORLD_SIZE": "1"}
    popen = subprocess.Popen(
        [sys.executable, "-c", program, orders], stdin=subprocess.PIPE, stderr=subprocess.PIPE, env=env, text=True
    )
    try:
        assert popen.stderr is not None
        return popen.stderr.read()
    finally:
        popen.kill()
        popen.communicate()


def test_a_rank_ends_with_whoever_started_it() -> None:
    orders = '{"backend": "gloo", "rendezvous": "/nowhere", "elements": []}'
    line = [sys.executable, contest.allreduce.__file__, orders]
    rank = subprocess.Popen(line, stdin=subprocess.PIPE, env={**os.environ, "RANK": "0", "WORLD_SIZE": "2"})
    assert rank.stdin is not None
    rank.stdin.close()  # as the kernel does when a process is killed
    assert rank.wait(60) == 1
