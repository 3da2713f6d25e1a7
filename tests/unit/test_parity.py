"""Parity's statistics: chance is not held against a draft, a real difference is, and counts mean what they say."""

import random
import statistics
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.bench import parity
from eyas.decode.acceptance import Tally, summary

DRAFT_TOKENS = 3


def acceptance(accepted: list[int]) -> dict[str, Any]:
    """Of verify steps that accepted so many drafts each."""
    tally = Tally(DRAFT_TOKENS, rows=1)
    for count in accepted:
        tally.add_round(min(count + 1, DRAFT_TOKENS), count)
    return summary(tally, Tally(DRAFT_TOKENS))


def drawn(rng: random.Random, rounds: int, rates: tuple[float, ...]) -> dict[str, Any]:
    """Verify steps in which the draft at each position is accepted with its rate."""
    found = []
    for _ in range(rounds):
        count = 0
        while count < DRAFT_TOKENS and rng.random() < rates[count]:
            count += 1
        found.append(count)
    return acceptance(found)


accepted_counts = st.lists(st.integers(0, DRAFT_TOKENS), min_size=1, max_size=80)


@given(accepted_counts, accepted_counts)
def test_variance_is_that_of_the_pooled_steps(one: list[int], other: list[int]) -> None:
    assert parity.variance(acceptance(one), acceptance(other)) == pytest.approx(
        statistics.pvariance([*one, *other]), abs=1e-9
    )


@given(accepted_counts)
def test_the_same_counts_never_differ(counts: list[int]) -> None:
    found = acceptance(counts)
    assert parity.compare(found, found, exact=True) == parity.compare(found, found, exact=False) == []
    assert parity.accept_length(found) == pytest.approx(1 + statistics.fmean(counts))


@given(accepted_counts, accepted_counts)
def test_either_side_may_be_the_prediction(one: list[int], other: list[int]) -> None:
    left, right = acceptance(one), acceptance(other)
    for exact in (True, False):
        assert bool(parity.compare(left, right, exact)) == bool(parity.compare(right, left, exact))


@given(accepted_counts, accepted_counts)
def test_positions_carry_both_sides_counts(one: list[int], other: list[int]) -> None:
    rows = parity.by_position(acceptance(one), acceptance(other))
    assert [row["position"] for row in rows] == [1, 2, 3]
    for row in rows:
        place = row["position"]
        assert row["reached_predicted"] == sum(count >= place - 1 for count in one)
        assert row["accepted_predicted"] == sum(count >= place for count in one)
        assert row["reached"] == sum(count >= place - 1 for count in other)
        assert row["accepted_served"] == sum(count >= place for count in other)


def test_chance_is_rarely_held_against_a_draft() -> None:
    """Two samples of one population: four comparisons at three standard errors each fail about once in a hundred."""
    rng = random.Random(0)
    rates = (0.7, 0.5, 0.4)
    wrong = sum(bool(parity.compare(drawn(rng, 400, rates), drawn(rng, 300, rates), exact=False)) for _ in range(300))
    assert wrong <= 12


@pytest.mark.parametrize(("rates", "position"), [((0.55, 0.5, 0.4), 1), ((0.7, 0.2, 0.4), 2), ((0.7, 0.5, 0.05), 3)])
def test_a_lower_rate_is_seen_where_it_is(rates: tuple[float, ...], position: int) -> None:
    rng = random.Random(1)
    for _ in range(20):
        reasons = parity.compare(drawn(rng, 2000, (0.7, 0.5, 0.4)), drawn(rng, 2000, rates), exact=False)
        assert any(f"at position {position} " in reason for reason in reasons)


def test_exact_figures_may_differ_by_a_tie_only() -> None:
    counts = [3, 0, 1, 2] * 100
    one = acceptance(counts)
    tie = acceptance([2, *counts[1:]])
    fault = acceptance([count - (count == 3) for count in counts])
    assert parity.compare(one, tie, exact=True) == []
    assert len(parity.compare(one, fault, exact=True)) == 2, "the accept length, and the third position"
    few = acceptance([count - (count == 3 and i < 40) for i, count in enumerate(counts)])
    assert parity.compare(one, few, exact=False) == [], "ten of 400 steps are within chance"
    assert parity.compare(one, few, exact=True) != []


@given(st.floats(0, 9), st.integers(1, 10**6), st.integers(1, 10**6))
def test_more_counts_allow_less_and_never_nothing(spread: float, n: int, m: int) -> None:
    may = parity.allowed(spread, n, m)
    assert parity.ABSOLUTE <= parity.allowed(spread, 4 * n, 4 * m) <= may
    assert parity.allowed(spread, n, m) == parity.allowed(spread, m, n)


def test_figures_that_cannot_be_compared() -> None:
    one = acceptance([1, 2])
    assert "3 and 5 draft tokens" in parity.compare(one, {**one, "draft_tokens": 5}, exact=True)[0]
    nothing = acceptance([])
    assert parity.accept_length(nothing) is None
    assert parity.compare(one, nothing, exact=True) == []


@pytest.mark.parametrize(
    ("lossless", "dtype", "exact"), [(True, "float32", True), (True, "bfloat16", False), (False, "float32", False)]
)
def test_a_decode_steps_own_figures(lossless: bool, dtype: str, exact: bool) -> None:
    counts = [3, 0, 1, 2] * 100
    few = acceptance([count - (count == 3 and i < 40) for i, count in enumerate(counts)])
    decode = {**few, "predicted": acceptance(counts), "lossless": lossless, "dtype": dtype}
    assert bool(parity.differs(decode)) is exact
    assert parity.differs({}) == []
