"""The verdict: what it says on which figures."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.bench.verdict import _deploy, decide, run, undecided
from eyas.progress import Silent
from eyas.spec import StepSpec


def acceptance(rounds: int, *accepted: int, reached: list[int] | None = None) -> dict[str, Any]:
    """An acceptance object as replay and decoding give it."""
    whole = reached or [rounds, *accepted[:-1]]
    return {
        "accept_length": 1 + sum(accepted) / rounds if rounds else 1.0,
        "rounds": rounds,
        "accepted": sum(accepted),
        "draft_tokens": len(accepted),
        "by_position": [
            {"position": i + 1, "reached": r, "accepted": a}
            for i, (r, a) in enumerate(zip(whole, accepted, strict=True))
        ],
        "looping": {"rows": 2, "accept_length": 3.1},
    }


def decoded(**changes: Any) -> dict[str, Any]:
    """A decode result that deserves a yes."""
    return {
        **acceptance(1000, 400, 150, 50),
        "predicted": acceptance(1000, 401, 150, 50),
        "lossless": True,
        "mismatches": 0,
        "prompts": 40,
        "speedup": {"ratio": 1.3, "low": 1.2, "high": 1.4},
        "timing": [],
        **changes,
    }


OTHERS: dict[str, Any] = {
    "replay": acceptance(9000, 3600, 1350, 450),
    "train": {"steps": 120, "tokens": 400_000, "loss": 2.0},
    "vocabulary": {"size": 4096, "coverage": 0.987},
    "capture": {"samples": 500, "tokens": 90_000, "quarantined": 3, "proofs": {}},
}


def verdict(**changes: Any) -> dict[str, Any]:
    return decide(decode=decoded(**changes), **OTHERS)


@pytest.mark.parametrize(
    ("changes", "expected", "first"),
    [
        ({}, "yes", "1.30 times as fast as without (interval 1.20 to 1.40)"),
        ({"speedup": {"ratio": 0.8, "low": 0.7, "high": 0.9}}, "no", "slower than without"),
        ({"speedup": {"ratio": 1.1, "low": 0.9, "high": 1.3}}, "no", "not proven faster"),
        ({"speedup": {"ratio": 1.1, "low": 1.0, "high": 1.3}}, "no", "not proven faster"),
        ({"speedup": {}}, "no", "no speed-up could be measured"),
        ({"speedup": {"ratio": 1.1, "low": float("nan"), "high": None}}, "no", "no speed-up could be measured"),
        ({"lossless": False, "mismatches": 3}, "no", "3 of 40 answers differ"),
        ({"lossless": None}, "no", "not lossless"),
        (
            {"predicted": acceptance(1000, 600, 300, 200)},
            "no",
            "accept length differ on the same prompts: 2.100 and 1.600",
        ),
        ({"predicted": acceptance(1000, 400, 150)}, "no", "2 and 3 draft tokens"),
        ({"predicted": acceptance(0, 0, 0, 0)}, "no", "the predicted accept length rests on no verify step"),
        (acceptance(0, 0, 0, 0), "no", "the decoded accept length rests on no verify step"),
        ({"predicted": {}}, "no", "Nothing was counted"),
        ({"accept_length": 1.9}, "no", "given as 1.90, but its counts make it 1.60"),
        ({"accepted": 601}, "no", "counts contradict each other: 601"),
    ],
)
def test_decision(changes: dict[str, Any], expected: str, first: str) -> None:
    found = verdict(**changes)
    assert found["deploy"] == {"verdict": expected, "max_concurrency": 1 if expected == "yes" else None}
    assert first in found["reasons"][0]


def test_same_accept_length_with_other_positions_is_a_mismatch() -> None:
    found = verdict(predicted=acceptance(1000, 250, 200, 150))
    assert found["accept_length"]["predicted"] == found["accept_length"]["served"]
    assert found["deploy"]["verdict"] == "no"
    assert found["reasons"][0].startswith("Acceptance at position 1 differs")


def test_chance_is_no_mismatch_and_more_counts_allow_less() -> None:
    small, large = acceptance(100, 45, 15, 5), acceptance(100_000, 45_000, 15_000, 5_000)
    assert verdict(predicted=small)["deploy"]["verdict"] == "yes"
    assert verdict(predicted=large, **acceptance(100_000, 40_000, 15_000, 5_000))["deploy"]["verdict"] == "no"


def test_a_hundredth_is_allowed_however_many_counts() -> None:
    many = 10**9
    right = acceptance(many, 400_000_000, 150_000_000)
    near, far = acceptance(many, 403_000_000, 151_000_000), acceptance(many, 415_000_000, 151_000_000)
    assert verdict(predicted=near, **right)["deploy"]["verdict"] == "yes"
    assert verdict(predicted=far, **right)["deploy"]["verdict"] == "no"


def test_format_and_sentences() -> None:
    found = verdict()
    length = found["accept_length"]
    assert (length["predicted"], length["served"], length["draft_tokens"]) == (1.601, 1.6, 3)
    assert length["by_position"][1] == {
        "position": 2, "reached_predicted": 401, "accepted_predicted": 150, "reached": 400, "accepted_served": 150,
    }  # fmt: skip
    assert length["looping"] == {"rows": 2, "predicted": 3.1, "served": 3.1}
    assert found["speedup"] == [{"concurrency": 1, "ratio": 1.3, "low": 1.2, "high": 1.4}]
    text = "\n".join(found["reasons"])
    for part in (
        "40 held-out prompts",
        "40% at position 1, 38% at position 2, 33% at position 3",
        "98.70%",
        "3 captured samples failed",
        "2 answers that repeat themselves",
        "says nothing about another engine",
        "400,000 tokens",
    ):
        assert part in text
    assert all(reason.endswith(".") for reason in found["reasons"])


@pytest.mark.parametrize(
    ("lows", "expected"),
    [
        ([1.2, 1.1, 1.05], ("yes", 4)),
        ([1.2, 1.1, 0.9], ("up_to", 2)),
        ([1.2, 0.9, 1.1], ("up_to", 1)),
        ([0.9, 1.1, 1.1], ("no", None)),
    ],
)
def test_every_smaller_concurrency_must_pay_too(lows: list[float], expected: tuple[str, int | None]) -> None:
    speedup = [
        {"concurrency": c, "ratio": low, "low": low, "high": low} for c, low in zip((4, 2, 1), lows[::-1], strict=True)
    ]
    assert tuple(_deploy(speedup, trusted=True)[0].values()) == expected
    assert _deploy(speedup, trusted=False)[0]["verdict"] == "no"


def test_a_draft_that_was_not_served_is_not_to_be_deployed_yet() -> None:
    found = undecided(**OTHERS)
    assert found["deploy"] == {"verdict": "no", "max_concurrency": None}
    assert found["reasons"][0].startswith("The draft was not served, so its speed is not known: server.url")
    assert found["accept_length"]["predicted"] == pytest.approx(OTHERS["replay"]["accept_length"])
    assert (found["accept_length"]["served"], found["speedup"], found["lossless"]) == (None, [], None)
    assert found.keys() == verdict().keys()


def test_nothing_quarantined_is_said() -> None:
    clean = {**OTHERS, "capture": {"samples": 500, "quarantined": 0}}
    assert "None of 500 captured samples failed a proof." in decide(decode=decoded(), **clean)["reasons"]


def test_entry_reads_the_inputs_and_writes_the_file(tmp_path: Path) -> None:
    results = {**OTHERS, "decode": decoded()}
    for name, result in results.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "result.json").write_text(json.dumps(result))
    out = tmp_path / "out"
    out.mkdir()
    spec = StepSpec("verdict", 0, {}, {name: tmp_path / name for name in results})
    assert run(spec, out, Silent()) == verdict() == json.loads((out / "verdict.json").read_text())


counts = st.integers(min_value=0, max_value=10**9)
figures = st.none() | st.floats() | counts
positions = st.lists(
    st.fixed_dictionaries({"position": st.integers(1, 16), "reached": counts, "accepted": counts}), max_size=4
)
sides = st.fixed_dictionaries(
    {},
    optional={
        "accept_length": figures,
        "rounds": counts,
        "accepted": counts,
        "draft_tokens": counts,
        "by_position": positions,
        "looping": st.fixed_dictionaries({}, optional={"rows": counts, "accept_length": figures}),
    },
)
pace = st.fixed_dictionaries({}, optional={"ratio": figures, "low": figures, "high": figures})
results = st.fixed_dictionaries(
    {}, optional={"samples": counts, "quarantined": counts, "coverage": figures, "steps": figures}
)


@given(sides, sides, sides, pace, st.booleans(), results)
def test_any_counts_give_a_verdict(
    replay: dict[str, Any],
    one: dict[str, Any],
    two: dict[str, Any],
    speed: dict[str, Any],
    lossless: bool,
    rest: dict[str, Any],
) -> None:
    decode = {**two, "predicted": one, "speedup": speed, "lossless": lossless}
    found = decide(replay, decode, rest, rest, rest)
    assert found["deploy"]["verdict"] in ("yes", "no")
    assert found["reasons"]
    json.dumps(found, allow_nan=False)


@given(st.integers(1, 10**6), st.floats(0, 1), st.floats(0, 1), pace, st.booleans())
def test_yes_only_if_lossless_and_proven_faster(
    rounds: int, one: float, two: float, speed: dict[str, Any], lossless: bool
) -> None:
    side = acceptance(rounds, int(rounds * one), int(rounds * one * two))
    found = verdict(**side, predicted=side, speedup=speed, lossless=lossless)
    measured = found["speedup"][0]
    faster = None not in measured.values() and measured["low"] > 1
    assert (found["deploy"]["verdict"] == "yes") == (lossless and faster)
    assert ("times as fast as without" in found["reasons"][0]) == (lossless and faster)


def test_the_same_tokens_in_float32_leave_no_room_for_chance() -> None:
    close = {"predicted": acceptance(100, 45, 15, 5), **acceptance(100, 40, 15, 5)}
    assert verdict(**close, dtype="bfloat16")["deploy"]["verdict"] == "yes"
    exact = verdict(**close, dtype="float32")
    assert exact["deploy"]["verdict"] == "no"
    assert "1.650 and 1.600, where 0.010 is allowed" in exact["reasons"][0]


def bench_row(concurrency: int, ratio: float, spread: float = 0.05, **changes: Any) -> dict[str, Any]:
    return {
        "workload": "heldout",
        "concurrency": concurrency,
        "temperature": 0.0,
        "draft_tokens": 3,
        "ratio": {"ratio": ratio, "low": ratio - spread, "high": ratio + spread},
        "acceptance": acceptance(1000, 400, 150, 50),
        "round_seconds": 0.012,
        "token_seconds": 0.01,
        **changes,
    }


@pytest.mark.parametrize(
    ("ratios", "expected"),
    [
        ([1.4, 1.2, 1.1], ("yes", 16)),
        ([1.4, 1.2, 0.9], ("up_to", 4)),
        ([1.4, 1.02, 1.2], ("up_to", 1)),
        ([0.9, 1.2, 1.2], ("no", None)),
    ],
)
def test_a_draft_is_deployed_up_to_where_it_pays(ratios: list[float], expected: tuple[str, int | None]) -> None:
    rows = [bench_row(c, ratio) for c, ratio in zip((1, 4, 16), ratios, strict=True)]
    found = verdict(bench=rows, launch="serve it")
    assert (found["deploy"]["verdict"], found["deploy"]["max_concurrency"]) == expected
    assert [row["break_even"] for row in found["speedup"]] == [pytest.approx(1.2)] * 3
    assert found["launch"] == "serve it"
    assert "must reach 1.20 tokens a step to pay on this server; this one reaches 1.60" in " ".join(found["reasons"])


def test_a_speed_up_beyond_the_accept_length_is_no_speed_up() -> None:
    """What a cold baseline once gave: 2.73 times, low end 1.7, from an accept length of 1.60."""
    found = verdict(bench=[bench_row(1, 2.73, 1.0)])
    assert found["deploy"]["verdict"] == "no"
    assert "cannot be: a verify step costs at least a plain step" in found["reasons"][0]


def test_a_baseline_that_drifts_further_than_the_gain_decides_nothing() -> None:
    rows = [bench_row(1, 1.3)]
    calm, moved = ({"again": {"bench": rows, "drift": {"1": {"ratio": r}}}} for r in (1.1, 0.7))
    assert decide(decode=decoded(), **OTHERS, more=calm)["deploy"]["verdict"] == "yes"
    found = decide(decode=decoded(), **OTHERS, more=moved)
    assert found["deploy"]["verdict"] == "no"
    assert "changed by 0.70 times between its two loads" in found["reasons"][0]


def test_other_workloads_and_temperatures_are_told_and_do_not_decide() -> None:
    rows = [bench_row(1, 1.4), bench_row(1, 0.8, workload="humaneval"), bench_row(1, 0.9, temperature=1.0)]
    found = verdict(bench=rows)
    assert found["deploy"]["verdict"] == "yes"
    text = " ".join(found["reasons"])
    assert "On humaneval at temperature 0, 1 request at a time: 0.80 times as fast" in text
    assert "On heldout at temperature 1, 1 request at a time: 0.90 times as fast" in text


def test_without_greedy_figures_the_first_temperature_decides() -> None:
    rows = [bench_row(1, 1.4, temperature=0.6), bench_row(1, 0.8, temperature=1.0)]
    found = verdict(bench=rows)
    assert [row["ratio"] for row in found["speedup"]] == [1.4]
    assert found["deploy"]["verdict"] == "yes"
    assert "at temperature 1, 1 request at a time: 0.80 times" in " ".join(found["reasons"])


def test_what_else_was_measured_is_told() -> None:
    more = {
        "sweep": {"best": [{"concurrency": 1, "draft_tokens": 5, "speedup": 1.4}], "crossover": 8},
        "candidates": {"candidates": [{"folder": "d", "accept_length": 1.9, "problem": None}]},
    }
    found = decide(decode=decoded(), **OTHERS, more=more)
    text = " ".join(found["reasons"])
    for said in ("draft tokens is 5 with 1 request", "Above 8 requests at a time plain decoding wins",
                 "existing draft d reaches 1.90"):  # fmt: skip
        assert said in text
    assert found["sweep"] == more["sweep"]
