"""`eyas tune` with real SGLang: two trials and their table."""

import json
import subprocess
import sys
from pathlib import Path

import yaml


def test_two_trials_and_their_table(sglang_python: str, smollm2: Path, tmp_path: Path) -> None:
    """On a processor neither is surely faster, so that the search may end with them or go on to confirm."""
    config = {
        "name": "tuned",
        "target": {"model": str(smollm2), "dtype": "float32"},
        "engine": {"kind": "sglang"},
        "server": {"python": sglang_python, "args": {"device": "cpu"}},
        "bench": {"prompts": 3, "rounds": 2, "max_new_tokens": 2, "max_loads": 4},
        "tune": {"options": ["disable-overlap-schedule"]},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    line = [sys.executable, "-m", "eyas", "tune", "run.yaml"]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "runs" / "tuned" / "tune" / "tune.json").read_text())
    (row,) = found["trials"]
    assert row["flags"] == {"disable-overlap-schedule": True}
    for one in (found["default"], row):
        assert one["state"] == "measured", one["why"]
        assert one["loads"] == 1
        assert one["start_seconds"] > 0
        assert one["figures"]["1"]["tokens_per_second"] > 0
        assert f"\n {one['name']} " in done.stdout
    assert row["ratio"]["low"] <= row["ratio"]["ratio"] <= row["ratio"]["high"]
    assert found["loads"] == (4 if found["confirmation"] else 2)
    assert found["grid_loads"] == 2
    assert ("--disable-overlap-schedule" in found["launch"]) is not found["default_kept"]
    left = {one["name"]: one["why"] for one in found["left_out"]}
    assert left["cuda-graph-max-bs-decode"] == "nothing of it runs on a CPU"
    assert left["NCCL_*"] == "no GPU: nothing is reduced through NCCL"
    assert f"SGLang {found['machine']['sglang']}" in done.stdout
    assert found["launch"] in done.stdout
