"""The whole graph on a tiny target, as a user starts it: once, again, killed, with bad input."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

PLACES = ["otter", "lighthouse", "violin", "glacier", "bakery", "sextant", "tulip", "harbour", "comet", "loom"]


@pytest.fixture(scope="module")
def setting(tiny_llama, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    (folder / "train.txt").write_text(
        "".join(f"Tell me about the {a} and the {b}.\n" for a in PLACES for b in PLACES[:4])
    )
    (folder / "held.txt").write_text("".join(f"Why would a {a} sing?\n" for a in PLACES))
    config = {
        "name": "tiny",
        "target": {"model": str(tiny_llama)},
        "prompts": {"train": str(folder / "train.txt"), "heldout": str(folder / "held.txt")},
        "answers": {"max_new_tokens": 16, "batch": 8},
        "draft": {"vocab_size": 100},
        "train": {"ttt_steps": 2, "epochs": 2.0, "batch_tokens": 256, "learning_rate": 1e-3},
        "decode": {"timing_prompts": 2},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    return folder


def command(setting: Path, runs: str, *more: str) -> list[str]:
    return [
        sys.executable,
        "-m",
        "eyas",
        "run",
        str(setting / "run.yaml"),
        "--runs",
        str(setting / runs),
        "--plain",
        *more,
    ]


def run(setting: Path, runs: str, *more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(setting, runs, *more), capture_output=True, text=True, timeout=400)


def digest(runs: Path) -> str:
    (found,) = (runs / "tiny" / "steps" / "train").glob("*/out/result.json")
    return json.loads(found.read_text())["digest"]


@pytest.fixture(scope="module")
def finished(setting):
    done = run(setting, "first")
    assert done.returncode == 0, done.stdout + done.stderr
    return setting / "first", done


def test_a_run_ends_in_a_verdict(finished):
    runs, done = finished
    folder = runs / "tiny"
    verdict = json.loads((folder / "verdict.json").read_text())
    assert verdict["lossless"] is True
    accept = verdict["accept_length"]
    assert accept["predicted"] == pytest.approx(accept["served"], abs=1e-9)
    assert verdict["deploy"]["verdict"] in ("yes", "no", "up_to")
    assert verdict["reasons"]
    assert set(verdict["seconds"]) >= {"target", "prompts", "answers", "capture", "train", "export", "decode"}
    assert "Accept length" in done.stdout
    assert (folder / "report.html").read_text().startswith("<!")
    json.loads((folder / "timeline.json").read_text())
    assert (folder / "draft" / "model.safetensors").is_file()
    assert (folder / "run.yaml").is_file()
    assert json.loads((folder / "versions.json").read_text())["torch"]


def test_the_same_command_does_nothing_twice(finished, setting):
    runs, _ = finished
    before = digest(runs)
    again = run(setting, "first")
    assert again.returncode == 0
    assert ": running" not in again.stdout
    assert digest(runs) == before


def test_replay_gives_the_figure_from_draft_and_prompts_alone(finished, setting, tiny_llama):
    runs, _ = finished
    (found,) = (runs / "tiny" / "steps" / "replay").glob("*/out/result.json")
    wanted = json.loads(found.read_text())
    done = subprocess.run(
        [
            *(sys.executable, "-m", "eyas", "replay", str(runs / "tiny" / "draft"), "--target", str(tiny_llama)),
            *("--prompts", str(setting / "held.txt"), "--max-new-tokens", "16", "--json"),
        ],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["rounds"], found["accepted"]) == (wanted["rounds"], wanted["accepted"])


def kill_steps(runs: Path) -> None:
    for path in (runs / "tiny" / "steps").glob("*/*/process.json"):
        try:
            process = json.loads(path.read_text())
            os.killpg(process["pid"], signal.SIGKILL)
        except (OSError, ValueError):
            continue


def disturbed(setting: Path, name: str, seed: int, kills: int) -> None:
    """Kill the runner, its steps or both at random moments, then let the run end."""
    dice = random.Random(seed)
    for _ in range(kills):
        runner = subprocess.Popen(command(setting, name), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(dice.uniform(1, 14))
        what = dice.choice(["runner", "steps", "both", "interrupt"])
        if what == "interrupt":
            runner.send_signal(signal.SIGINT)
        if what in ("runner", "both"):
            runner.kill()
        if what in ("steps", "both"):
            kill_steps(setting / name)
            runner.kill()
        runner.wait(timeout=60)
    done = run(setting, name)
    assert done.returncode == 0, done.stdout + done.stderr


def test_killed_at_random_it_ends_in_the_same_checkpoint(finished, setting):
    disturbed(setting, "killed", seed=1, kills=3)
    assert digest(setting / "killed") == digest(finished[0])


@pytest.mark.long
@pytest.mark.parametrize("seed", range(10, 14))
def test_killed_many_times_it_ends_in_the_same_checkpoint(finished, setting, seed):
    disturbed(setting, f"killed-{seed}", seed, kills=5)
    assert digest(setting / f"killed-{seed}") == digest(finished[0])
    shutil.rmtree(setting / f"killed-{seed}")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("target.model=/nowhere/model", "/nowhere/model"),
        ("target.modle=x", "did you mean target.model?"),
        ("prompts.train=/nowhere/prompts.txt", "/nowhere/prompts.txt"),
        ("answers.max_new_tokens=0", "answers.max_new_tokens"),
    ],
)
def test_bad_input_is_one_line(setting, change, message):
    done = run(setting, "bad", change)
    assert done.returncode == 2, done.stdout + done.stderr
    assert message in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
