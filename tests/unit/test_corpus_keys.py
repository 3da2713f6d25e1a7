"""Keys are equal exactly where the content is."""

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.corpus.keys import conversation_key, prompt_key, sample_key

TOKENS = st.lists(st.integers(0, 200_000), max_size=30)
VALUES = st.dictionaries(st.text(max_size=5), st.one_of(st.text(max_size=5), st.integers(), st.booleans()), max_size=5)


def shuffled(value: dict[str, Any], seed: int) -> dict[str, Any]:
    items = list(value.items())
    random.Random(seed).shuffle(items)
    return dict(items)


@given(TOKENS, VALUES, st.integers(0, 99))
def test_order_of_keys_does_not_matter(ids: list[int], value: dict[str, Any], seed: int) -> None:
    other = shuffled(value, seed)
    assert prompt_key(ids, value) == prompt_key(tuple(ids), other)
    assert conversation_key([value]) == conversation_key([other])


@given(TOKENS, TOKENS)
def test_other_ids_other_keys(a: list[int], b: list[int]) -> None:
    assert (prompt_key(a) == prompt_key(b)) == (a == b)
    assert (sample_key(a, [True] * len(a)) == sample_key(b, [True] * len(b))) == (a == b)


@given(TOKENS)
def test_kind_of_integer_does_not_matter(ids: list[int]) -> None:
    mask = [token % 2 == 0 for token in ids]
    array = np.array(ids, np.int64)
    assert prompt_key(array) == prompt_key(ids)
    assert sample_key(array, np.array(mask, bool)) == sample_key(ids, mask) == sample_key(ids, [int(m) for m in mask])


def test_mask_and_sampling_count() -> None:
    assert sample_key([1, 2], [False, True]) != sample_key([1, 2], [True, True])
    assert prompt_key([1]) == prompt_key([1], {"temperature": 0}) != prompt_key([1], {"temperature": 1})
    assert prompt_key([1, 2]) != sample_key([1, 2], [False, False])
    with pytest.raises(ValueError, match="2 ids but 1 mask"):
        sample_key([1, 2], [True])


def test_keys_never_change() -> None:
    """They name what lies in stores: another formula would orphan all of it."""
    assert prompt_key([1, 2, 3]) == "f2b56eaad6c0e0d6effa30acf732f3c7"
    assert sample_key([1, 2, 3], [False, True, True]) == "b40690b270afc4cf91502456eccc85cd"
    assert conversation_key([{"role": "user", "content": "hi"}]) == "c98dc1ab9a02911521b662132d8a1f7a"


def test_conversations_are_normalised() -> None:
    plain = conversation_key([{"role": "user", "content": "caf\u00e9\nau lait"}])
    assert conversation_key([{"role": "user", "content": " cafe\u0301\r\nau lait\n", "name": None}]) == plain
    assert conversation_key([{"role": "user", "content": "caf\u00e9 au lait"}]) != plain
    assert conversation_key([{"role": "system", "content": "caf\u00e9\nau lait"}]) != plain
