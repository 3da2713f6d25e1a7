"""Runs on a host behind a real sshd, with toy steps: started, watched, cut, stopped, and brought home."""

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
from loopback import Proxy, Server, working_under

from eyas.hosts.ssh import Link
from eyas.run.folder import RunFolder

RUNFILE = "name: toy\ntarget: {model: /models/none}\n"


def wait(what: Callable[[], object], seconds: float = 60) -> None:
    until = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.05)


@contextlib.contextmanager
def laptop(tmp_path: Path, toys: dict[str, object], *command: str) -> Iterator["subprocess.Popen[str]"]:
    """An `eyas` as a process of its own, killed at the end."""
    (tmp_path / "toy.yaml").write_text(RUNFILE)
    with (tmp_path / "said.txt").open("ab") as said:
        popen = subprocess.Popen(
            [
                sys.executable,
                str(Path(__file__).with_name("laptop.py")),
                *(command or ("run", "toy.yaml", "--host", "box")),
            ],
            stdout=said,
            stderr=said,
            cwd=tmp_path,
            env={**os.environ, "EYAS_TOYS": json.dumps(toys)},
            text=True,
        )
        try:
            yield popen
        finally:
            popen.kill()
            popen.wait()


def finished(tmp_path: Path, popen: "subprocess.Popen[str]", code: int = 0) -> str:
    """What was said, once it has ended with this code."""
    assert popen.wait(60) == code, (tmp_path / "said.txt").read_text()
    return (tmp_path / "said.txt").read_text()


def far_run(root: Path) -> RunFolder:
    return RunFolder(root / "runs" / "toy")


def begun(root: Path, step: str) -> bool:
    with contextlib.suppress(Exception):
        return bool(far_run(root).steps()[step].progress().milestone)
    return False


def attempts(root: Path) -> dict[str, int]:
    """How often each step was begun."""
    return {
        name: sum('"attempt"' in line for line in (step.path / "progress.jsonl").read_text().splitlines())
        for name, step in far_run(root).steps().items()
    }


def nothing_runs(root: Path) -> None:
    wait(lambda: not working_under(root))


def test_a_whole_run(server: Server, root: Path, tmp_path: Path) -> None:
    server.host(root, on_end="echo $EYAS_CODE > ended")
    with laptop(tmp_path, {"one": {"pieces": 2}}) as popen:
        said = finished(tmp_path, popen)
    assert "one: finished" in said
    home = tmp_path / "runs" / "toy@box"
    assert json.loads((home / "verdict.json").read_text())["seconds"].keys() == {"one", "two", "side", "export"}
    assert (home / "draft" / "piece0").read_text() == "export 0\n"
    wait((root / "ended").exists)
    assert (root / "ended").read_text() == "0\n"
    nothing_runs(root)
    assert attempts(root) == {"one": 1, "two": 1, "side": 1, "export": 1}


def test_a_laptop_that_dies_costs_nothing(server: Server, root: Path, tmp_path: Path) -> None:
    server.host(root)
    gate = tmp_path / "gate"
    with laptop(tmp_path, {"one": {"wait_for": str(gate)}}) as popen:
        wait(lambda: begun(root, "one"))
        popen.send_signal(signal.SIGKILL)
    gate.touch()
    with laptop(tmp_path, {}, "watch", "toy", "--host", "box") as other:
        said = finished(tmp_path, other)
    assert said.count("one: finished") == 1
    assert (tmp_path / "runs" / "toy@box" / "verdict.json").exists()
    assert set(attempts(root).values()) == {1}


def test_the_same_command_attaches_to_what_runs(server: Server, root: Path, tmp_path: Path) -> None:
    server.host(root)
    gate = tmp_path / "gate"
    toys: dict[str, object] = {"one": {"wait_for": str(gate)}}
    with laptop(tmp_path, toys) as first:
        wait(lambda: begun(root, "one"))
        first.send_signal(signal.SIGINT)
        assert "eyas watch toy --host box" in finished(tmp_path, first, 130)
    with laptop(tmp_path, toys) as again:
        wait(lambda: (tmp_path / "said.txt").read_text().count("one: running") == 2)
        with laptop(tmp_path, {}, "run", "toy.yaml", "seed=1", "--host", "box") as different:
            assert "is under way on box with another run file" in finished(tmp_path, different, 2)
        gate.touch()
        finished(tmp_path, again)
    assert set(attempts(root).values()) == {1}


def test_stop_ends_everything_and_the_run_goes_on(server: Server, root: Path, tmp_path: Path) -> None:
    server.host(root)
    gate = tmp_path / "gate"
    toys: dict[str, object] = {"one": {"wait_for": str(gate)}}
    with laptop(tmp_path, toys) as first:
        wait(lambda: begun(root, "one"))
        with laptop(tmp_path, {}, "status", "toy", "--host", "box") as status:
            assert "one           running" in finished(tmp_path, status)
        with laptop(tmp_path, {}, "stop", "toy", "--host", "box") as stop:
            finished(tmp_path, stop)
        finished(tmp_path, first, 130)
    nothing_runs(root)
    gate.touch()
    with laptop(tmp_path, toys) as again:
        finished(tmp_path, again)
    assert attempts(root) == {"one": 2, "two": 1, "side": 1, "export": 1}


def test_a_failed_step_is_a_failed_run_here_too(server: Server, root: Path, tmp_path: Path) -> None:
    server.host(root)
    with laptop(tmp_path, {"one": {"refuse": True}}) as popen:
        said = finished(tmp_path, popen, 2)
    assert "one: failed: sample 3 of prompts.txt is empty" in said
    assert json.loads((tmp_path / "runs" / "toy@box" / "verdict.json").read_text())["reasons"]


def test_a_held_service_is_handed_to_the_next_runner(
    server: Server, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.host(root)
    monkeypatch.setenv("EYAS_HOLD", "served 60")
    with laptop(tmp_path, {"judged": {"refuse": True}}) as first:
        wait(lambda: "web stays up until" in (tmp_path / "said.txt").read_text())
        first.send_signal(signal.SIGINT)
        finished(tmp_path, first, 130)
    with laptop(tmp_path, {}) as mended:
        said = finished(tmp_path, mended)
    assert "judged: finished" in said
    assert said.count("web is ready") == 1
    nothing_runs(root)


def test_cuts_a_killed_master_and_a_restarted_server(server: Server, proxy: Proxy, root: Path, tmp_path: Path) -> None:
    host = server.host(root, server.client(proxy.port))
    gate = tmp_path / "gate"
    with laptop(tmp_path, {"one": {"wait_for": str(gate)}}) as popen:
        wait(lambda: begun(root, "one"))
        for times in range(2):
            proxy.cut()
            wait(lambda times=times: proxy.made > times + 1)  # type: ignore[misc]
        wait(lambda: "one: works" in (tmp_path / "said.txt").read_text())
        text = subprocess.run(
            [*Link(host).ssh, "-O", "check", "box"], capture_output=True, text=True, check=False
        ).stderr
        os.kill(int(text.partition("pid=")[2].partition(")")[0]), signal.SIGKILL)
        server.stop()
        time.sleep(0.5)
        server.start()
        gate.touch()
        said = finished(tmp_path, popen)
    assert "connection lost" in said
    assert said.count("one: finished") == said.count("export: finished") == 1
    assert set(attempts(root).values()) == {1}
    nothing_runs(root)


def test_a_machine_that_was_started_anew(server: Server, root: Path, tmp_path: Path) -> None:
    server.host(root)
    gate = tmp_path / "gate"
    toys: dict[str, object] = {"one": {"pieces": 3, "wait_for": str(gate)}}
    with laptop(tmp_path, toys) as popen:
        wait(lambda: begun(root, "one") and far_run(root).steps()["one"].progress().done == 3)
        server.stop()
        for sign in (signal.SIGSTOP, signal.SIGKILL):  # All at once, as the power goes.
            for pid in working_under(root):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, sign)
        server.start()
        gate.touch()
        said = finished(tmp_path, popen)
    assert "is gone without a word: it is started again" in said
    assert "one: begins at piece 3" in said
    assert attempts(root)["one"] == 2
    nothing_runs(root)
