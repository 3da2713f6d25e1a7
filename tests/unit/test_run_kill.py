"""Runners and steps that are killed, stopped, started twice, or run out of disk."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import toyrun
from eyas.errors import UserError
from eyas.run import lock, process
from eyas.run.folder import RunFolder, StepFolder

pytestmark = pytest.mark.usefixtures("toys")


def wait(what: Callable[[], bool], seconds: float = 10) -> None:
    until = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.02)


@contextlib.contextmanager
def runner(folder: Path, config: dict[str, object]) -> Iterator[subprocess.Popen[str]]:
    """A runner as a process of its own; killed at the end if it still lives."""
    command = [sys.executable, str(Path(toyrun.__file__)), str(folder), json.dumps(config)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as popen:
        try:
            yield popen
        finally:
            popen.kill()


def working(folder: Path, name: str) -> StepFolder | None:
    with contextlib.suppress(UserError):
        step = RunFolder(folder).steps()[name]
        return step if step.running and step.progress().milestone else None
    return None


def test_a_killed_runner_is_taken_over(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    config = {"one": {"wait_for": str(gate)}, "side": {}}
    with runner(tmp_path / "run", config) as first:
        wait(lambda: working(tmp_path / "run", "one") is not None)
        step = RunFolder(tmp_path / "run").steps()["one"]
        who = process.who_runs(step.path)
        first.kill()
        first.wait()
    assert step.running
    gate_opener = subprocess.Popen([sys.executable, "-c", f"import time; time.sleep(0.5); open({str(gate)!r}, 'w')"])
    code, seen = toyrun.run(tmp_path / "run", config)
    gate_opener.wait()
    assert code == 0
    assert "one running" in seen.states
    assert process.who_runs(step.path) == who  # The same process, first attempt.
    assert seen.views["one"].seconds is not None


def test_what_finished_without_a_runner_is_adopted(tmp_path: Path) -> None:
    config = {"one": {"pieces": 5, "sleep": 0.1}}
    with runner(tmp_path, config) as first:
        wait(lambda: working(tmp_path, "one") is not None)
        step = RunFolder(tmp_path).steps()["one"]
        first.kill()
        first.wait()
    wait(lambda: not step.running)
    code, seen = toyrun.run(tmp_path, config)
    assert code == 0
    assert "one reused" in seen.states
    assert step.exit()["code"] == 0


def test_a_step_of_an_edited_run_file_is_ended(tmp_path: Path) -> None:
    with runner(tmp_path, {"one": {"wait_for": str(tmp_path / "never")}}) as first:
        wait(lambda: working(tmp_path, "one") is not None)
        step = RunFolder(tmp_path).steps()["one"]
        first.kill()
        first.wait()
    code, seen = toyrun.run(tmp_path)
    assert code == 0
    assert any(note.startswith("ending one (process ") for note in seen.notes)
    assert not step.running


@pytest.mark.parametrize("numbers", [[signal.SIGINT, signal.SIGINT], [signal.SIGTERM]])
def test_stopping_ends_the_children_and_keeps_the_state(tmp_path: Path, numbers: list[int]) -> None:
    config = {"one": {"pieces": 2}, "two": {"pieces": 2, "wait_for": str(tmp_path / "gate")}}
    with runner(tmp_path / "run", config) as first:
        wait(lambda: working(tmp_path / "run", "two") is not None)
        step = RunFolder(tmp_path / "run").steps()["two"]
        wait(lambda: step.progress().done == 2)
        for number in numbers:
            first.send_signal(number)
            time.sleep(0.3)
        output, _ = first.communicate(timeout=10)
    assert first.returncode == 130
    assert "two: stopped" in output
    assert not step.running
    (tmp_path / "gate").touch()
    code, seen = toyrun.run(tmp_path / "run", config)
    assert code == 0
    assert "one reused" in seen.states
    assert "two: begins at piece 2" in seen.said


def test_interrupted_once_it_finishes_what_runs(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with runner(tmp_path / "run", {"one": {"wait_for": str(gate)}}) as first:
        wait(lambda: working(tmp_path / "run", "one") is not None)
        first.send_signal(signal.SIGINT)
        time.sleep(0.3)
        assert first.poll() is None
        gate.touch()
        output, _ = first.communicate(timeout=10)
    assert first.returncode == 130
    assert "no other step is started; Ctrl-C again stops" in output
    assert "one: finished in" in output
    assert "two: running" not in output


def test_a_killed_step_ran_out_of_memory_most_likely(tmp_path: Path) -> None:
    with runner(tmp_path, {"one": {"wait_for": str(tmp_path / "never")}}) as first:
        wait(lambda: working(tmp_path, "one") is not None)
        step = RunFolder(tmp_path).steps()["one"]
        os.kill(process.who_runs(step.path)["pid"], signal.SIGKILL)
        output, _ = first.communicate(timeout=10)
    assert first.returncode == 2
    assert "one: failed: killed by the system, most likely for want of memory" in output
    assert step.exit()["code"] == -9


def test_a_second_runner_is_refused(tmp_path: Path) -> None:
    with runner(tmp_path, {"one": {"wait_for": str(tmp_path / "never")}}) as first:
        wait(lambda: working(tmp_path, "one") is not None)
        with pytest.raises(UserError, match=rf"run by process {first.pid} on \S+: watch it.*kill {first.pid}"):
            toyrun.run(tmp_path)
        assert lock.owner(tmp_path)["pid"] == first.pid
        first.terminate()
        first.communicate(timeout=10)


def test_a_child_whose_lock_is_held_but_unknown_is_waited_for(tmp_path: Path) -> None:
    """A runner killed right after it started a child: the child has the lock, but has not said who it is."""
    handle = process.try_lock(tmp_path / "lock")
    assert handle is not None
    child = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(60)"], pass_fds=(handle,), start_new_session=True
    )
    os.close(handle)
    late = "import time, json, sys; time.sleep(0.3); open(sys.argv[1], 'w').write(sys.argv[2])"
    with subprocess.Popen(
        [sys.executable, "-c", late, str(tmp_path / "process.json"), json.dumps(process.identity(child.pid))]
    ):
        found = process.attach(tmp_path)
    assert found is not None
    assert found.who["pid"] == child.pid
    child.kill()
    child.wait()
    assert process.attach(tmp_path) is None


def test_a_forked_helper_that_outlives_its_step_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "IDENTIFY_SECONDS", 0.3)
    handle = process.try_lock(tmp_path / "lock")
    assert handle is not None
    fork = "import os, sys, time\nif os.fork() == 0: time.sleep(60)\n"
    step = subprocess.Popen([sys.executable, "-c", fork], pass_fds=(handle,), start_new_session=True)
    os.close(handle)
    (tmp_path / "process.json").write_text(json.dumps(process._described(step.pid)))
    step.wait()
    assert process.try_lock(tmp_path / "lock") is None
    assert process.attach(tmp_path) is None


@pytest.mark.parametrize("other", [{"start": 1}, {"boot": "another"}, {"host": "elsewhere"}])
def test_a_stranger_with_an_old_number_is_never_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: dict[str, object]
) -> None:
    monkeypatch.setattr(process, "IDENTIFY_SECONDS", 0.2)
    handle = process.try_lock(tmp_path / "lock")
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    (tmp_path / "process.json").write_text(json.dumps(process.identity(stranger.pid) | other))
    with pytest.raises(UserError, match="something holds its lock and has not said who it is"):
        process.attach(tmp_path)
    assert handle is not None
    assert stranger.poll() is None
    stranger.kill()
    stranger.wait()
    os.close(handle)


def test_a_new_child_is_not_taken_for_the_one_before(tmp_path: Path) -> None:
    """Until it says who it is, nothing in the folder does; the attempts and seconds before are not forgotten."""
    before = process.identity(os.getpid()) | {"attempt": 4, "spent": 7.5}
    (tmp_path / "process.json").write_text(json.dumps(before))
    child = process.start(tmp_path, "one")  # Without a spec: it only says who it is, and ends.
    assert process.who_runs(tmp_path).get("pid") in (None, child.who["pid"])
    wait(lambda: not child.running())
    assert child.exit()["code"] == 2
    now = process.who_runs(tmp_path)
    assert (now["pid"], now["attempt"], now["spent"]) == (child.who["pid"], 5, 7.5)
    assert not (tmp_path / "previous.json").exists()


def test_a_process_number_that_is_used_again_is_not_taken_for_the_child() -> None:
    who = process.identity(os.getpid())
    assert process.alive(who)
    assert not process.alive({**who, "start": who["start"] - 1})
    assert not process.alive({**who, "boot": "another"})
    assert not process.alive({})


@pytest.fixture
def small_disk(tmpfs: Callable[[str], Path]) -> Path:
    """A file system of one MiB."""
    return tmpfs("1m")


def test_a_full_disk_is_one_line_and_the_rest_is_kept(small_disk: Path) -> None:
    steps = toyrun.CHAIN[:2]
    code, seen = toyrun.run(small_disk / "run", {"two": {"lines": 200_000}}, steps=steps)
    assert code == 2
    assert "disk full while writing" in (seen.views["two"].error or "")
    code, seen = toyrun.run(small_disk / "run", {"two": {"lines": 10}}, steps=steps)
    assert code == 0
    assert "one reused" in seen.states


def test_a_full_disk_stops_the_runner_with_one_line(small_disk: Path) -> None:
    with contextlib.suppress(OSError), (small_disk / "filler").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1024))
    with pytest.raises(UserError, match=r"full|I/O"):
        toyrun.run(small_disk / "run")


def test_a_read_only_folder_is_one_line(small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    with pytest.raises(UserError, match="read-only file system: choose another folder with --runs DIR"):
        toyrun.run(small_disk / "run")


def test_a_file_in_the_way_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file where a folder should be")
    with pytest.raises(UserError, match=r"runs.*a file stands where a folder is needed"):
        toyrun.run(tmp_path / "runs" / "run")
    with pytest.raises(UserError, match="runs is a file, not a run folder"):
        toyrun.run(tmp_path / "runs")
