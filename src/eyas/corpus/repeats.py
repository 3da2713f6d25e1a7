"""Answers that run in circles: a small model's greedy loops, which any drafter predicts, are reported apart."""

from collections.abc import Sequence

LOOP = 8


def loops(ids: Sequence[int]) -> bool:
    """Does an 8-gram occur twice in these answer tokens?"""
    seen: set[tuple[int, ...]] = set()
    for i in range(len(ids) - LOOP + 1):
        gram = tuple(ids[i : i + LOOP])
        if gram in seen:
            return True
        seen.add(gram)
    return False
