"""What people see."""

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from eyas.run.folder import StepFolder
from eyas.run.protocol import ProgressState
from eyas.run.view import View
from eyas.ui.live import Live
from eyas.ui.plain import Plain
from eyas.ui.single import Lines
from eyas.ui.summary import acceptance, summary
from eyas.ui.text import amount, duration

ERROR = "out of memory: lower answers.batch\x1b[31m\nand again"


def views() -> list[View]:
    running = ProgressState()
    now = time.time()
    for line in (
        {"t": now - 10, "attempt": 1},
        {"t": now - 10, "total": 120_000, "unit": "tokens", "done": 0},
        {"t": now, "done": 40_000},
        {"t": now, "milestone": "evaluating\x1b[2J [bold]acceptance[/bold]"},
    ):
        running.take(line)
    folder = StepFolder(Path("/nowhere"))
    return [
        View("target", folder, "finished", reused=True, seconds=1.25),
        View("vocabulary", folder, "running", progress=running, began=now - 10),
        View("train", folder, "waiting", expected=75.0),
        View("export", folder, "failed", error=ERROR, seconds=3725.0),
        View("decode", folder, "stopped", seconds=61.0),
    ]


@pytest.mark.parametrize("width", [20, 40, 59, 60, 80, 96, 120, 200])
@pytest.mark.parametrize("colour", [True, False])
def test_the_live_table_fits_every_width(width: int, colour: bool) -> None:
    console = Console(width=width, force_terminal=True, no_color=not colour, legacy_windows=False)
    live = Live(console)
    live._views = views()
    with console.capture() as capture:
        console.print(live.table())
    plain = re.sub(r"\x1b\[[0-9;]*m", "", capture.get())
    lines = [line for line in plain.splitlines() if line.strip()]
    assert all(len(line) <= width for line in lines)
    assert len(lines) == 5
    assert ("\x1b[3" in capture.get()) is colour
    assert "\x1b[2J" not in capture.get()
    if width >= 80:
        text = "\n".join(lines)
        assert "40k/120k tokens" in text
        assert "10 s, 20 s left" in text
        assert "expected 1 min 15 s" in text
        assert "1 h 02 min" in text
        assert "out of memory" in text
    if width >= 96:
        assert "4000 tokens/s" in "\n".join(lines)
    if width >= 200:
        assert "[bold]acceptance[/bold]" in "\n".join(lines)


def test_a_live_run_from_begin_to_end(capsys: pytest.CaptureFixture[str]) -> None:
    live = Live(Console(width=80, force_terminal=True, no_color=True))
    all_views = views()
    live.begin(all_views, [])
    live.changed(all_views[3])
    live.note("ending one")
    live.tick()
    live.end()
    out = capsys.readouterr().out
    assert "export failed: out of memory" in out
    assert "ending one" in out


def test_plain_lines_have_no_control_characters(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Plain()
    all_views = views()
    plain.begin(all_views, [])
    for view in all_views:
        plain.changed(view)
    plain.milestone(all_views[1], "a\nb\x1b[2J")
    plain.tick()
    before = capsys.readouterr().out
    assert "tokens" not in before  # Not due yet.
    monkeypatch.setattr("eyas.ui.plain.EVERY_SECONDS", 0.0)
    plain.tick()
    out = before + capsys.readouterr().out
    plain.end()
    assert "[00:00] vocabulary: 40k/120k tokens, 4000 tokens/s, 20 s left" in out
    assert "target: finished before, reused" in out
    assert "export: failed: out of memory: lower answers.batch [31m and again" in out
    assert all(line.isprintable() for line in out.splitlines())
    assert len(out.splitlines()) == 7


def test_lines_of_one_piece_of_work(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eyas.ui.single.EVERY_SECONDS", 0.0)
    lines = Lines()
    lines.total(10, "rows")
    lines.advance(5)
    lines.metric(loss=1.0)
    assert capsys.readouterr().err == "5/10 rows\n"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "–"), (0.04, "0.0 s"), (9.94, "9.9 s"), (9.96, "10 s"), (59.6, "1 min 00 s"), (3599.7, "1 h 00 min"),
        (7620, "2 h 07 min"),
    ],
)  # fmt: skip
def test_durations(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (0.25, "0.25"), (9999, "9999"), (12_345, "12.3k"), (4.56e6, "4.56M"), (999_999, "1M")]
)
def test_amounts(value: float, text: str) -> None:
    assert amount(value) == text


VERDICT: dict[str, Any] = {
    "accept_length": {
        "predicted": 1.52, "served": 1.49, "draft_tokens": 3,
        "by_position": [
            {"position": 1, "reached_predicted": 90, "accepted_predicted": 31, "reached": 100, "accepted_served": 33},
            {"position": 2, "reached_predicted": 310, "accepted_predicted": 100, "reached": 0, "accepted_served": 0},
        ],
        "looping": {"rows": 4, "predicted": 1.9, "served": 1.8},
    },
    "speedup": [{"concurrency": 1, "ratio": 1.21, "low": 1.1, "high": 1.3}],
    "lossless": True,
    "deploy": {"verdict": "yes", "max_concurrency": 1},
    "reasons": ["It is faster."],
    "seconds": {"target": 3.0, "train": 61.0},
}  # fmt: skip
TIMELINE = {"otherData": {"steps": {"target": {"state": "finished", "reused": True}, "train": {"state": "finished"}}}}


def write(folder: Path, verdict: Any, timeline: Any) -> Path:
    (folder / "demo").mkdir(exist_ok=True)
    (folder / "demo" / "verdict.json").write_text(json.dumps(verdict))
    (folder / "demo" / "timeline.json").write_text(json.dumps(timeline))
    return folder / "demo"


def test_the_summary_says_what_matters(tmp_path: Path) -> None:
    folder = write(tmp_path, VERDICT, TIMELINE)
    (folder / "draft").mkdir()
    text = summary(folder, 64.0)
    for piece in (
        "demo: deploy the draft (after 1 min 04 s)",
        "1.49 decoded, 1.52 predicted",
        "33.0%",
        "34.4%",
        "1.21 times, interval 1.10 to 1.30, with 1 request at once",
        "Lossless        yes",
        "  - It is faster.",
        "left out: 4 looping rows",
        f"Draft           {folder / 'draft'}",
        "train 1 min 01 s",
        "target (3.0 s saved)",
    ):
        assert piece in text
    assert all(line.rstrip() == line and len(line) <= 120 for line in text.splitlines())


def test_the_summary_says_how_to_serve(tmp_path: Path) -> None:
    launch = "python3 -m sglang.launch_server --model-path /models/m"
    served = {
        "speedup": [{"concurrency": 8, "ratio": 1.21, "low": 1.1, "high": 1.3, "break_even": 1.31}],
        "deploy": {"verdict": "up_to", "max_concurrency": 8},
        "launch": launch,
        "sweep": {"best": [{"concurrency": 1, "draft_tokens": 5, "speedup": 1.4},
                           {"concurrency": 8, "draft_tokens": 2, "speedup": 1.25}]},
    }  # fmt: skip
    text = summary(write(tmp_path, VERDICT | served, TIMELINE), 64.0)
    for piece in (
        "deploy the draft for up to 8 requests at once",
        "with 8 requests at once; pays from 1.31 tokens a step",
        "Draft tokens    best 5 (1.40 times) with 1, 2 (1.25 times) with 8 at once",
        f"Serve it with   {launch}\n",
    ):
        assert piece in text
    refused = {"deploy": {"verdict": "no", "max_concurrency": None}}
    assert launch not in summary(write(tmp_path, VERDICT | served | refused, TIMELINE), 64.0)


def test_a_summary_of_a_failed_run(tmp_path: Path) -> None:
    steps = {"target": {"state": "finished"}, "train": {"state": "failed"}}
    folder = write(tmp_path, {"reasons": ["train failed: disk full"]}, {"otherData": {"steps": steps}})
    (folder / "draft").mkdir()
    text = summary(folder, 4)
    assert "no verdict, train failed after 4.0 s" in text
    assert "train failed: disk full" in text
    assert "Draft" not in text


@pytest.mark.parametrize("strange", [None, 3, "x", [], [3], {}])
@pytest.mark.parametrize("key", [*VERDICT, "launch", "sweep", "bench", "otherData"])
def test_a_summary_of_strange_data(tmp_path: Path, key: str, strange: Any) -> None:
    summary(write(tmp_path, VERDICT | {key: strange}, TIMELINE | {key: strange}), 1)


def test_a_summary_of_nothing(tmp_path: Path) -> None:
    assert "without a verdict" in summary(tmp_path, 1)


def test_acceptance() -> None:
    found = {
        "accept_length": 1.52, "rounds": 9000, "draft_tokens": 3,
        "by_position": [{"position": 1, "reached": 9000, "accepted": 3100}],
        "looping": {"rows": 4, "accept_length": 1.9},
    }  # fmt: skip
    text = acceptance(found)
    assert "1.52" in text
    assert "position 1: 34.4% of 9000 accepted" in text
    assert "4, left out above; alone 1.90" in text
    acceptance({})
