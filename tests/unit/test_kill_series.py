"""Runners, steps and services killed at random moments: the run ends as if nobody had disturbed it."""

import contextlib
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

import toyrun
from eyas.run import process
from eyas.run.folder import RunFolder

pytestmark = pytest.mark.usefixtures("toys")

CONFIG = {
    "one": {"pieces": 3, "sleep": 0.1},
    "side": {"pieces": 4, "sleep": 0.15},
    "two": {"pieces": 2, "sleep": 0.1},
    "alone": {"pieces": 2, "sleep": 0.1},
}


def start(folder: Path) -> "subprocess.Popen[bytes]":
    command = [sys.executable, toyrun.__file__, str(folder), json.dumps(CONFIG), "mixed"]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def kill_one(folder: Path, kind: str, dice: random.Random) -> None:
    """SIGKILL a running step or service, its whole process group."""
    folders = [path.parent for path in folder.glob(f"{kind}/*/*/process.json")]
    alive = [who for who in map(process.who_runs, folders) if process.alive(who)]
    if alive:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(dice.choice(alive)["pid"], signal.SIGKILL)


def disturb(folder: Path, dice: random.Random, kills: int) -> None:
    """Kill something `kills` times, at random moments from the start of a runner on; then let the run end."""
    for _ in range(kills):
        with start(folder) as runner:
            with contextlib.suppress(subprocess.TimeoutExpired):
                runner.wait(dice.uniform(0, 2.5))
            what = dice.choice(["runner", "steps", "services", "runner and steps", "runner and services"])
            for kind in ("steps", "services"):
                if kind in what:
                    kill_one(folder, kind, dice)
            if "runner" not in what:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    runner.wait(dice.uniform(0, 1.5))
            runner.kill()
    for _ in range(3):  # The first may only find out that a killed step has failed.
        with start(folder) as runner:
            if runner.wait(60) == 0:
                return
    pytest.fail("the run does not come to its end")


def outputs(folder: Path) -> dict[str, bytes]:
    """Content of everything that was published, less what names processes."""
    found = {}
    for out in sorted(folder.glob("steps/*/*/out")):
        for path in sorted(out.iterdir()):
            if path.name not in ("outputs.json", "result.json"):
                found[f"{out.parent.parent.name}/{path.name}"] = path.read_bytes()
    return found


def leftovers(folder: Path) -> list[str]:
    """Processes that still work for a run."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if str(folder).encode() in (command := path.read_bytes()):
                found.append(command.decode(errors="replace"))
    return found


def check(tmp_path: Path, seed: int, kills: int) -> None:
    folder, undisturbed = tmp_path / f"killed-{seed}", tmp_path / "undisturbed"
    if not undisturbed.exists():
        with start(undisturbed) as runner:
            assert runner.wait(60) == 0
    disturb(folder, random.Random(seed), kills)
    assert outputs(folder) == outputs(undisturbed), f"seed {seed}"
    published = Counter(out.parent.parent.name for out in folder.glob("steps/*/*/out"))
    assert set(published.values()) == {1}
    assert published.keys() == {step.name for step in toyrun.MIXED}
    with contextlib.closing(sqlite3.connect(RunFolder(folder).journal)) as db:
        finished = Counter(
            name for (name,) in db.execute("SELECT step FROM events WHERE state = 'finished' AND detail = ''")
        )
    assert max(finished.values()) == 1, "an output was published twice"
    until = time.monotonic() + 5
    while (left := leftovers(folder)) and time.monotonic() < until:
        time.sleep(0.05)
    assert left == [], f"seed {seed}"


def test_a_dozen_random_kills(tmp_path: Path) -> None:
    for seed, kills in ((1, 5), (2, 7)):
        check(tmp_path, seed, kills)


@pytest.mark.long
def test_three_hundred_random_kills(tmp_path: Path) -> None:
    for seed in range(100, 150):
        check(tmp_path, seed, kills=6)
