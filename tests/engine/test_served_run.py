"""A whole run with real SGLang, killed on the way: regeneration, capture, training, and the draft served."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from eyas.engines.sglang import kept
from eyas.run.journal import events

STEPS = [
    "target",
    "prompts",
    "doctor",
    "answers",
    "capture",
    "baseline",
    "train",
    "export",
    "decode",
    "again",
    "verdict",
    "card",
]


@pytest.fixture(scope="module")
def finished(sglang_python: str, smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A finished run whose server was killed while it captured; its folder and what it said."""
    folder = tmp_path_factory.mktemp("served")
    config = {
        "name": "small",
        "target": {"model": str(smollm2), "dtype": "float32"},
        "engine": {"kind": "sglang"},
        "server": {
            "python": sglang_python,
            "twin": False,
            "args": {"device": "cpu", "chunked-prefill-size": 128, "sleep-on-idle": True},
        },
        "prompts": {"train_limit": 40, "heldout_limit": 8},
        "answers": {"max_new_tokens": 16},
        "draft": {"vocab_size": 500},
        "train": {"ttt_steps": 2, "epochs": 1.0, "batch_tokens": 512, "learning_rate": 1e-3},
        "bench": {
            "concurrencies": [1, 2],
            "prompts": 3,
            "rounds": 2,
            "max_new_tokens": 8,
            "sweep": [1],
            "max_loads": 1,
        },
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "eyas", "run", "run.yaml", "--runs", "runs", "--plain"]
    with (folder / "said").open("w") as said:
        run = subprocess.Popen(command, cwd=folder, stdout=said, stderr=subprocess.STDOUT)
        try:
            kill_while_capturing(folder / "runs" / "small", run)
            code = run.wait(900)
        finally:
            if run.poll() is None:
                run.terminate()
                run.wait(60)
    text = (folder / "said").read_text()
    assert code == 0, text
    return folder / "runs" / "small", text


def kill_while_capturing(folder: Path, run: "subprocess.Popen[bytes]") -> None:
    """SIGKILL the server's scheduler as soon as the capture step has some samples."""
    while run.poll() is None:
        for path in folder.glob("steps/capture/*/progress.jsonl"):
            lines = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
            if any(line.get("done", 0) > 0 for line in lines):
                (status,) = folder.glob("services/server/*/**/status/rank0.json")
                os.kill(json.loads(status.read_text())["pid"], signal.SIGKILL)
                return
        time.sleep(0.02)


def result(folder: Path, step: str) -> dict[str, Any]:
    (path,) = folder.glob(f"steps/{step}/*/out/result.json")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_every_step_finished_and_the_server_was_started_again(finished: tuple[Path, str]) -> None:
    folder, _ = finished
    told = events(folder / "journal.sqlite3")
    done = {event["step"] for event in told if event["state"] == "finished"}
    assert set(STEPS) <= done
    assert [event["step"] for event in told if event["detail"].startswith("lost a service")] == ["capture"]


def test_the_doctor_found_nothing_wrong(finished: tuple[Path, str]) -> None:
    """Checks for which a slow machine left no time are neither passed nor failed; the first ones are always made."""
    folder, _ = finished
    checks = {check["name"]: check for check in result(folder, "doctor")["checks"]}
    assert [check for check in checks.values() if check["passed"] is False] == []
    assert checks["lengths 1, 2, 127, 128, 129"]["passed"] is True


def test_nothing_was_lost(finished: tuple[Path, str]) -> None:
    folder, _ = finished
    captured, answers = result(folder, "capture"), result(folder, "answers")
    assert captured["quarantined"] == 0
    assert captured["samples"] == answers["rows"] + answers["heldout_rows"] - sum(captured["dropped"].values())
    for name, proof in captured["proofs"].items():
        assert proof["checked"] >= (1 if name == "recaptured" else captured["samples"]), name
        assert proof["failed"] == 0, name


def test_the_served_draft_is_lossless_and_accepted_as_predicted(finished: tuple[Path, str]) -> None:
    folder, _ = finished
    verdict = json.loads((folder / "verdict.json").read_text())
    assert verdict["lossless"] is True
    accept = verdict["accept_length"]
    assert accept["served"] == pytest.approx(accept["predicted"], abs=0.02)
    for position in accept["by_position"]:
        assert position["reached"] > 0 or position["position"] > 1


def test_figures_are_served_ones_with_and_without_the_draft(finished: tuple[Path, str]) -> None:
    """At each concurrency, against both loads of the plain server; the card and the command come with the draft."""
    folder, _ = finished
    verdict = json.loads((folder / "verdict.json").read_text())
    assert [row["concurrency"] for row in verdict["speedup"]] == [1, 2]
    for row in verdict["bench"]:
        assert (len(row["plain"]["rounds"]), len(row["draft"]["rounds"])) == (4, 2)
        assert row["round_seconds"] > row["token_seconds"] > 0
        assert row["acceptance"]["rounds"] + row["acceptance"]["looping"]["rounds"] > 0
    sweep = verdict["sweep"]
    assert [(row["draft_tokens"], row["concurrency"]) for row in sweep["rows"]] == [(1, 1), (3, 1), (1, 2), (3, 2)]
    assert sweep["loads"] == sum(row["measured"] is not None for row in sweep["rows"][::2]) / 2
    assert "--speculative-algorithm EAGLE3" in verdict["launch"]
    assert sorted(path.name for path in (folder / "draft").iterdir() if path.suffix != ".json") == [
        "README.md",
        "model.safetensors",
    ]
    assert verdict["launch"] in (folder / "draft" / "README.md").read_text()


def test_nothing_is_left_running(finished: tuple[Path, str]) -> None:
    """Neither the launcher, which carries the service's mark, nor the last server's scheduler, nor captures."""
    folder, _ = finished
    statuses = list(folder.glob("services/*/**/status/rank0.json"))
    assert statuses
    for status in statuses:
        said = json.loads(status.read_text())
        assert not Path(f"/proc/{said['pid']}").exists()
        assert not Path(said["root"]).exists()
        assert not kept.marked(kept.mark_of(status.parent.parent))
