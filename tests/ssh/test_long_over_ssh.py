"""Minutes over SSH: fifty cuts, ten minutes of silence, and the whole graph on a tiny target, there as here."""

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from loopback import Proxy, Server
from test_remote_run import attempts, begun, finished, laptop, nothing_runs, wait

pytestmark = pytest.mark.long


def test_fifty_cuts(server: Server, proxy: Proxy, root: Path, tmp_path: Path) -> None:
    server.host(root, server.client(proxy.port))
    chance, gate = random.Random(0), tmp_path / "gate"
    toys: dict[str, object] = {"one": {"pieces": 200, "sleep": 0.05}, "two": {"wait_for": str(gate)}}
    with laptop(tmp_path, toys) as popen:
        wait(lambda: begun(root, "one"), 60)
        for _ in range(50):
            time.sleep(chance.random() * 4)
            proxy.delay = chance.random() * 0.05
            proxy.cut()
        gate.touch()
        said = finished(tmp_path, popen)
    assert proxy.made > 20
    for step in ("one", "two", "side", "export"):
        assert said.count(f"{step}: finished") == 1
    assert set(attempts(root).values()) == {1}
    assert (tmp_path / "runs" / "toy@box" / "draft" / "piece0").read_text() == "export 0\n"
    nothing_runs(root)


@pytest.mark.parametrize("seconds", [60, 601])
def test_silence(server: Server, proxy: Proxy, root: Path, tmp_path: Path, seconds: int) -> None:
    server.host(root, server.client(proxy.port), alive_seconds=15)
    with laptop(tmp_path, {"one": {"pieces": 2}}) as popen:
        wait(lambda: begun(root, "one"))
        proxy.silent = True
        time.sleep(seconds)
        proxy.silent = False
        said = finished(tmp_path, popen)
    assert said.count("export: finished") == 1
    assert set(attempts(root).values()) == {1}
    nothing_runs(root)


def test_the_whole_graph_ends_in_the_same_checkpoint(
    server: Server, root: Path, tmp_path: Path, tiny_llama: Path
) -> None:
    places = ["otter", "lighthouse", "violin", "glacier", "bakery"]
    (tmp_path / "train.txt").write_text("".join(f"Tell of the {a} and the {b}.\n" for a in places for b in places))
    (tmp_path / "held.txt").write_text("".join(f"Why would a {a} sing?\n" for a in places))
    config = {
        "name": "tiny",
        "target": {"model": str(tiny_llama)},
        "prompts": {"train": "train.txt", "heldout": "held.txt"},
        "answers": {"max_new_tokens": 16, "batch": 8},
        "draft": {"vocab_size": 100},
        "train": {"ttt_steps": 2, "epochs": 2.0, "batch_tokens": 256, "learning_rate": 1e-3},
        "decode": {"timing_prompts": 2},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    server.host(root)
    for more in ([], ["--host", "box"]):
        command = [sys.executable, "-m", "eyas", "run", "run.yaml", "--plain", *more]
        done = subprocess.run(
            command,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    there, here = root / "runs" / "tiny", tmp_path / "runs" / "tiny"
    digests = [
        json.loads(next(run.glob("steps/train/*/out/result.json")).read_text())["digest"] for run in (here, there)
    ]
    assert digests[0] == digests[1]
    home = tmp_path / "runs" / "tiny@box"
    assert (home / "draft" / "model.safetensors").read_bytes() == (here / "draft" / "model.safetensors").read_bytes()
    assert (home / "report.html").read_text().startswith("<!")
    assert not list(home.rglob("*.partial"))
    nothing_runs(root)
