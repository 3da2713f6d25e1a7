"""The definition of acceptance: pooled, bonus included, cut rounds, loops apart."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.corpus.repeats import loops
from eyas.decode.acceptance import Tally, summary, walk


def test_walk_by_hand():
    # Answer x[3:9]; slots 2..6 can draft. Slot 2 accepts two of three, so the next round starts at slot 5.
    hits = [[0] * 3 for _ in range(9)]
    hits[2] = [1, 1, 0]
    hits[5] = [1, 1, 1]
    tally = walk(hits, 3, 9, 3)
    # Slot 5 has room for two drafts only: x[7] and x[8].
    assert (tally.rounds, tally.reached, tally.accepted) == (2, [2, 2, 1], [2, 2, 0])
    assert tally.accept_length == 3.0


def test_an_untrained_draft_has_accept_length_one():
    assert walk([[0, 0]] * 6, 2, 6, 2).accept_length == 1.0


def test_pooled_is_no_mean_of_means():
    long, short = Tally(1, rounds=9, reached=[9], accepted=[0]), Tally(1, rounds=1, reached=[1], accepted=[1])
    long.add(short)
    assert long.accept_length == pytest.approx(1.1)


def test_answers_without_a_round_count_nothing():
    assert walk([[1]], 0, 1, 1).rounds == 0
    assert summary(Tally(2), Tally(2))["accept_length"] == 1.0


@given(st.data(), st.integers(1, 4), st.integers(1, 12))
def test_a_walk_emits_each_token_once(data, draft_tokens, answer):
    first = 2
    row = st.lists(st.integers(0, 1), min_size=draft_tokens, max_size=draft_tokens)
    hits = data.draw(st.lists(row, min_size=first + answer, max_size=first + answer))
    tally = walk(hits, first, first + answer, draft_tokens)
    # Every round gives its accepted drafts and, unless the answer ended with one of them, one more.
    emitted = 1 + sum(tally.accepted) + tally.rounds
    assert answer <= emitted <= answer + 1
    assert all(a >= b for a, b in zip(tally.reached, tally.reached[1:], strict=False))


def test_loops():
    assert not loops(list(range(30)))
    assert loops([*range(8), *range(8)])
    assert not loops([*range(7), *range(7)])
    assert loops([5] * 9)
