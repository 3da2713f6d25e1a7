"""The draft vocabulary: most frequent first, filled up, ties by id."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from eyas.draft.vocabulary import choose


def test_most_frequent_ids_sorted():
    assert choose(torch.tensor([5, 0, 9, 1, 9]), 3).tolist() == [0, 2, 4]


def test_fewer_distinct_ids_than_asked_for_are_filled_up():
    assert choose(torch.tensor([0, 0, 0, 7]), 3).tolist() == [0, 1, 3]


@given(st.lists(st.integers(0, 5), min_size=1, max_size=30), st.data())
def test_any_counts(counts, data):
    size = data.draw(st.integers(1, len(counts)))
    ids = choose(torch.tensor(counts), size).tolist()
    assert ids == sorted(set(ids))
    assert len(ids) == size
    left = set(range(len(counts))) - set(ids)
    assert all(counts[a] >= counts[b] for a in ids for b in left)
