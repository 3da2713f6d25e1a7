"""What a round costs, when a draft pays, and how many tokens to draft."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.bench import cost, sweep
from eyas.bench.cost import Costs


def row(k: int, concurrency: int, ratio: float, token: float = 0.01, draft: float = 0.002) -> dict[str, Any]:
    return {
        "concurrency": concurrency,
        "draft_tokens": k,
        "token_seconds": token,
        "round_seconds": token + k * draft,
        "ratio": {"ratio": ratio, "low": ratio, "high": ratio},
    }


def test_break_even_is_the_price_of_a_round_in_plain_tokens() -> None:
    assert cost.break_even(row(3, 1, 1.0)) == pytest.approx(1.6)
    assert cost.break_even({"round_seconds": None, "token_seconds": 0.01}) is None


def test_looping_answers_count_where_time_is_concerned() -> None:
    part = {"rounds": 100, "accept_length": 1.5, "looping": {"rounds": 300, "accept_length": 3.5}}
    assert cost.accept_length({"acceptance": part}) == pytest.approx(3.0)
    assert cost.accept_length({"acceptance": None}) is None


@given(
    st.floats(0.001, 1.0), st.floats(0.0, 0.1), st.floats(0.0, 0.1),
    st.lists(st.integers(1, 8), min_size=2, max_size=4, unique=True), st.integers(1, 16),
)  # fmt: skip
def test_costs_on_a_line_are_found_again(
    token: float, verify: float, draft: float, measured: list[int], asked: int
) -> None:
    costs = Costs(token, {k: token + verify + k * draft for k in measured})
    assert costs.round(asked) == pytest.approx(token + verify + asked * draft)
    assert costs.speedup(asked, 2.0) == pytest.approx(2 * token / (token + verify + asked * draft))


def test_one_measured_length_is_joined_with_the_plain_token() -> None:
    costs = Costs(0.01, {3: 0.016})
    assert costs.round(1) == pytest.approx(0.012)
    assert costs.round(5) == pytest.approx(0.020)


def test_a_prediction_says_what_it_rests_on() -> None:
    assert [Costs(0.01, {3: 0.016}).basis(k) for k in (3, 1)] == ["measured", "estimated"]
    assert Costs(0.01, {3: 0.016, 1: 0.012}).basis(5) == "fitted"


def judged(failed: dict[int, str] | None = None) -> dict[str, Any]:
    accepts = {1: 1.5, 3: 1.9, 5: 2.0}
    measured = {3: {1: row(3, 1, 1.2), 16: row(3, 16, 0.8)}, 1: {1: row(1, 1, 1.25), 16: row(1, 16, 0.95)}}
    return sweep.judge([1, 3, 5], accepts, measured, failed or {})


def test_the_best_of_each_concurrency_and_where_plain_decoding_wins() -> None:
    found = judged({5: "out of memory"})
    assert [(one["concurrency"], one["draft_tokens"]) for one in found["best"]] == [(1, 1), (16, 1)]
    assert (found["crossover"], found["loads"]) == (1, 2)
    first = found["rows"][0]  # one draft token, one request: 1.25 measured, and predicted from three draft tokens alone
    assert (first["measured"]["ratio"], first["predicted"]["basis"]) == (1.25, "estimated")
    assert first["predicted"]["speedup"] == pytest.approx(1.5 * 0.01 / 0.012)
    (failed, _) = (one for one in found["rows"] if one["draft_tokens"] == 5)
    assert (failed["measured"], failed["reason"]) == (None, "out of memory")
    assert failed["predicted"]["speedup"] == pytest.approx(2.0 * 0.01 / 0.02)


def test_what_was_not_measured_says_why() -> None:
    measured = {3: {1: row(3, 1, 1.1)}}
    found = sweep.judge([1, 3, 9], {1: 1.6, 3: 1.76, 9: 1.8}, measured, {})
    reasons = {one["draft_tokens"]: one["reason"] for one in found["rows"]}
    assert reasons == {1: "bench.max_loads was spent before", 3: None, 9: "others were predicted to be faster"}
    assert (found["rows"][1]["predicted"]["basis"], found["loads"]) == ("measured", 0)


def test_the_next_load_goes_to_the_best_prediction() -> None:
    measured = {3: {1: row(3, 1, 1.1)}}
    assert sweep._next([1, 5], {1: 1.5, 3: 1.76, 5: 1.8}, measured) == 1
    assert sweep._next([1, 5], {1: 1.2, 3: 1.76, 5: 3.0}, measured) == 5
    assert sweep._next([1, 5], {1: 1.2, 3: 1.76, 5: 1.8}, measured) is None
    assert sweep._next([], {3: 1.76}, measured) is None
