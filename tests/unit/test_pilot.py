"""The gate behind a pilot."""

from pathlib import Path
from typing import Any

import pytest

from eyas.bench import pilot
from eyas.decode.acceptance import Tally, summary
from eyas.errors import UserError
from eyas.files import write_json
from eyas.progress import Silent
from eyas.spec import StepSpec

CURVE = [{"tokens": t, "accept_length": a} for t, a in ((0, 1.2), (1000, 1.3), (2000, 1.4), (4000, 1.5))]


def acceptance(accepted: int, rounds: int = 1000) -> dict[str, Any]:
    tally = Tally(3, rounds=rounds, reached=[rounds, accepted, 0], accepted=[accepted, 0, 0], rows=50)
    return summary(tally, Tally(3))


def decode(accepted: int = 500, **more: Any) -> dict[str, Any]:
    base = {"predicted": acceptance(500), "lossless": True, "dtype": "bfloat16", "mismatches": 0, "prompts": 50}
    return {**acceptance(accepted), **base, **more}


def costs(needed: float) -> list[dict[str, Any]]:
    rows = [{"temperature": 0.0, "concurrency": c, "token_seconds": 0.01} for c in (1, 8)]
    return [{**rows[0], "round_seconds": needed * 0.01}, {**rows[1], "round_seconds": 1.0}]


def test_a_pilot_that_can_pay_passes() -> None:
    found = pilot.judge(acceptance(500), decode(bench=costs(1.6)), {"curve": CURVE}, 32.0, 3)
    assert found["against"] == []
    assert found["accept_length"] == 1.5
    assert found["break_even"] == pytest.approx(1.6)
    # From 1,000 to 4,000 tokens two doublings gained 0.2; five more are taken to gain half as much again.
    assert found["reach"] == pytest.approx(1.5 + 5 * 0.1 * 1.5)


def test_what_cannot_pay_is_stopped_before_it_costs_hours() -> None:
    (said,) = pilot.judge(acceptance(500), decode(bench=costs(3.2)), {"curve": CURVE}, 32.0, 3)["against"]
    assert "must reach 3.20 tokens a step" in said
    assert "32 times as many samples bring it to 2.25 at best" in said


def test_a_draft_never_reaches_more_than_it_drafts() -> None:
    steep = [{"tokens": t, "accept_length": a} for t, a in ((1000, 1.0), (4000, 3.0))]
    assert pilot.judge(acceptance(500), decode(), {"curve": steep}, 1000.0, 3)["reach"] == 4.0


def test_without_costs_only_parity_counts() -> None:
    found = pilot.judge(acceptance(500), decode(), {"curve": CURVE}, 32.0, 3)
    assert (found["against"], found["break_even"]) == ([], None)


@pytest.mark.parametrize(
    ("faulty", "text"),
    [
        (decode(lossless=False, mismatches=3), "3 of 50 answers with the draft are not the target's own"),
        (decode(accepted=200), "differ"),
    ],
)
def test_parity_is_asked_for(faulty: dict[str, Any], text: str) -> None:
    assert any(text in said for said in pilot.judge(acceptance(500), faulty, {"curve": CURVE}, 32.0, 3)["against"])


def test_the_step_stops_the_run_unless_told_otherwise(tmp_path: Path) -> None:
    results = {
        "prompts": {"train": 9600},
        "replay": acceptance(500),
        "decode": decode(bench=costs(3.2)),
        "train": {"curve": CURVE},
    }
    for name, result in results.items():
        (tmp_path / name).mkdir()
        write_json(tmp_path / name / "result.json", result)
    inputs = {name: tmp_path / name for name in results}

    def run(require: bool) -> dict[str, Any]:
        sections = {"pilot": {"samples": 300, "require": require}, "decode": {}}
        return pilot.run(StepSpec("pilot", 0, sections, inputs), tmp_path, Silent())

    with pytest.raises(UserError, match=r"the pilot of 300 samples failed: .* set pilot\.require=false"):
        run(True)
    assert run(False)["against"]
