"""`eyas tune` with real SGLang: two trials and their table."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from eyas.bench.tune import tune
from eyas.config import parse
from eyas.progress import Silent
from eyas.ui import tuned


def test_two_trials_and_their_table(
    sglang_python: str, smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The search alone: a confirmation, if noise asked for one, takes two more loads (see tests/unit/test_tune.py)."""
    monkeypatch.setattr(tune, "choose", lambda rows: None)
    config = {
        "name": "tuned",
        "target": {"model": str(smollm2), "dtype": "float32"},
        "engine": {"kind": "sglang"},
        "server": {"python": sglang_python, "args": {"device": "cpu"}},
        "bench": {"prompts": 3, "rounds": 2, "max_new_tokens": 2, "max_loads": 4},
        "tune": {"options": ["disable-overlap-schedule"]},
    }
    found = tune.run(parse(config, "test"), tmp_path, Silent())
    console = Console(width=120, record=True, file=io.StringIO())
    tuned.show(found, console)
    table = console.export_text()
    (row,) = found["trials"]
    assert row["flags"] == {"disable-overlap-schedule": True}
    for one in (found["default"], row):
        assert one["state"] == "measured", one["why"]
        assert one["loads"] == 1
        assert one["start_seconds"] > 0
        assert one["figures"]["1"]["tokens_per_second"] > 0
        assert f"\n {one['name']} " in table
    assert row["ratio"]["low"] <= row["ratio"]["ratio"] <= row["ratio"]["high"]
    assert (found["loads"], found["grid_loads"]) == (2, 2)
    left = {one["name"]: one["why"] for one in found["left_out"]}
    assert left["cuda-graph-max-bs-decode"] == "nothing of it runs on a CPU"
    assert left["NCCL_*"] == "no GPU: nothing is reduced through NCCL"
    assert f"SGLang {found['machine']['sglang']}" in table
    assert found["launch"] in table
