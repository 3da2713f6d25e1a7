"""`eyas doctor`: its table and its exit codes."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from eyas import cli
from eyas.ui.checks import table

FINE = {"name": "it captures", "passed": True, "detail": "64 captures", "remedy": ""}
BROKEN = {"name": "ranks agree", "passed": False, "detail": "rank 1: partial sums", "remedy": "report it"}
UNTRIED = {"name": "the longest", "passed": None, "detail": "no time", "remedy": ""}


def test_the_table_names_what_failed_and_how_to_mend_it() -> None:
    lines = table({"checks": [FINE, BROKEN, UNTRIED], "seconds": 61.0}).splitlines()
    assert lines == [
        "pass  it captures  64 captures",
        "FAIL  ranks agree  rank 1: partial sums",
        "                   → report it",
        "–     the longest  no time",
        "",
        "1 passed, 1 failed, 1 not tried, in 1 min 01 s",
    ]


def test_long_details_are_wrapped_and_control_characters_shown() -> None:
    text = table({"checks": [FINE | {"detail": "word " * 60 + "\x1b[31m"}], "seconds": 1.0})
    assert max(map(len, text.splitlines())) <= 110
    assert "\x1b" not in text


@pytest.fixture
def runfile(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text("name: a\ntarget: {model: /m}\nengine: {kind: sglang}\n")
    return path


def run(monkeypatch: pytest.MonkeyPatch, checks: list[dict[str, Any]], *args: str) -> tuple[int, dict[str, bool]]:
    """The exit code, and what was asked for."""
    asked: dict[str, bool] = {}

    def examine(config: Any, progress: Any, *, prove: bool, serve: bool) -> dict[str, Any]:
        asked.update(prove=prove, serve=serve)
        return {"checks": checks, "seconds": 2.0}

    monkeypatch.setattr("eyas.engines.sglang.doctor.examine", examine)
    monkeypatch.setattr(sys, "argv", ["eyas", "doctor", *args])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0), asked


def test_exit_codes(runfile: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, [FINE, UNTRIED], str(runfile)) == (0, {"prove": True, "serve": True})
    assert "1 passed, 0 failed, 1 not tried" in capsys.readouterr().out
    assert run(monkeypatch, [FINE, BROKEN], str(runfile), "--twin-only") == (1, {"prove": True, "serve": False})
    assert run(monkeypatch, [FINE], str(runfile), "--skip-twin") == (0, {"prove": False, "serve": True})


def test_json(runfile: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, [BROKEN], str(runfile), "--json")[0] == 1
    assert json.loads(capsys.readouterr().out) == {"checks": [BROKEN], "seconds": 2.0}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["engine.kind=transformers"], "doctor examines SGLang: set engine.kind=sglang"),
        (["--twin-only", "--skip-twin"], "--twin-only leaves nothing to do"),
        (["--twin-only", "server.twin=false"], "--twin-only leaves nothing to do"),
    ],
)
def test_what_makes_no_sense(
    args: list[str],
    message: str,
    runfile: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(monkeypatch, [], str(runfile), *args)[0] == 2
    assert message in capsys.readouterr().err
