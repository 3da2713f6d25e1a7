"""Blocks, their figures, and how sure a ratio of two servers is."""

import json
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.bench import measure, served
from eyas.bench.measure import Block, Load, Request
from eyas.decode.acceptance import Tally


def block(seconds: dict[str, float], concurrency: int = 1, tokens: int = 10, wall: float | None = None) -> Block:
    requests = [Request(key, [7] * tokens, s, s / 10, [s / 10] * 9, None, True) for key, s in seconds.items()]
    return Block(wall if wall is not None else sum(seconds.values()), concurrency, requests)


def test_a_block_survives_its_file() -> None:
    tally = Tally(3, rounds=4, reached=[4, 2, 1], accepted=[2, 1, 0], rows=1)
    one = Block(
        2.0, 4, [Request("a", [1, 2], 1.0, 0.5, [0.25], tally, True), Request("b", [3], 1.0, 0.5, [], None, True)]
    )
    assert Block.from_json(json.loads(json.dumps(one.to_json()))) == one
    assert (one.tokens, one.tokens_per_second, one.rounds) == (3, 1.5, 4)


def test_prompts_differ_and_the_ratio_of_one_at_a_time_is_theirs() -> None:
    """Each prompt is twice as fast; the spread between prompts, a hundredfold here, is no uncertainty."""
    plain = [block({"a": 1.0, "b": 10.0, "c": 100.0})] * 2
    draft = [block({"a": 0.5, "b": 5.0, "c": 50.0})] * 2
    found = measure.ratio(plain, draft)
    assert found["ratio"] == pytest.approx(2.0)
    assert found["low"] == pytest.approx(found["high"])


def test_answers_of_other_lengths_are_timed_by_the_token() -> None:
    """Below float32 a draft may change an answer's length; a shorter answer is no speed-up."""
    plain, draft = block({"a": 4.0}, tokens=4), block({"a": 1.0}, tokens=2)
    assert measure.ratio([plain], [draft])["ratio"] == pytest.approx(2.0)
    (row,) = served.compare({("heldout", 1, 0.0): [plain]}, {("heldout", 1, 0.0): [draft]})
    assert (row["tokens"], row["draft_tokens"], row["equal"]) == (4, 2, False)
    assert served.compare({}, {("heldout", 1, 0.0): [draft]}) == []


def test_several_at_a_time_are_compared_by_whole_blocks() -> None:
    plain = [block({"a": 1.0}, 8, 100, wall) for wall in (1.0, 1.1, 0.9)]
    draft = [block({"a": 1.0}, 8, 100, wall) for wall in (0.5, 0.55, 0.45)]
    found = measure.ratio(plain, draft)
    assert found["ratio"] == pytest.approx(2.0, rel=1e-3)
    assert found["low"] < 2.0 < found["high"]
    assert measure.ratio(plain[:1], draft[:1])["low"] is None


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6), st.floats(0.5, 3.0))
def test_the_interval_covers_the_true_ratio(seed: int, true: float) -> None:
    """Of 60 pairs of noisy servers, the 95 % interval misses few."""
    generator = random.Random(seed)
    missed = 0
    for _ in range(60):
        rates = [[scale * math.exp(generator.gauss(0, 0.05)) for _ in range(4)] for scale in (1.0, true)]
        plain, draft = ([block({"a": 1.0}, 4, 100, 100 / rate) for rate in side] for side in rates)
        found = measure.ratio(plain, draft)
        missed += not found["low"] <= true <= found["high"]
    assert missed <= 11  # more happens in less than one of 10,000 such runs


def test_figures_are_medians_and_percentiles() -> None:
    found = measure.figures([block({"a": 1.0, "b": 2.0}), block({"a": 2.0, "b": 4.0}), block({"a": 1.0, "b": 1.0})])
    assert found["rounds"] == [pytest.approx(20 / 3, abs=1e-3), pytest.approx(20 / 6, abs=1e-3), 10.0]
    assert found["tokens_per_second"] == pytest.approx(20 / 3)
    assert (found["tokens"], found["requests"]) == (60, 6)
    assert found["first_token"] == {"p50": 0.1, "p99": 0.4}


def test_gaps_are_seconds_a_token() -> None:
    assert measure.gaps_of([1.0, 2.0, 5.0], [1, 3, 4]) == [0.5, 3.0]
    assert measure.gaps_of([1.0, 2.0], [4, 4]) == []


def test_costs_leave_the_prefill_out() -> None:
    tally = Tally(3, rounds=4, reached=[4, 2, 1], accepted=[2, 1, 0], rows=1)
    drafted = Block(2.0, 1, [Request("a", [1] * 8, 1.0, 0.2, [], tally, True)])
    assert measure.round_seconds([drafted]) == pytest.approx(0.2)
    assert measure.token_seconds([block({"a": 1.0})]) == pytest.approx(0.1)
    assert measure.round_seconds([block({"a": 1.0})]) is None
    found = measure.row("heldout", Load(1, 8, 0.0, 3), [block({"a": 1.0})], [drafted])
    assert found["acceptance"]["rounds"] + found["acceptance"]["looping"]["rounds"] == 4
