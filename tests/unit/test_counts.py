"""Counts of a served request equal those of replay, however the last step overshot the answer."""

import random

import pytest

from eyas.bench.counts import tally_of
from eyas.decode.acceptance import walk
from eyas.errors import UserError


def serve(hits, length, draft_tokens):
    """What SGLang says of an answer of `length` tokens whose drafts hit as told: its events."""
    said, place, steps = [1], 1, [0] * (draft_tokens + 1)
    while place < length:
        accepted = 0
        while accepted < draft_tokens and hits[place - 1][accepted]:
            accepted += 1
        steps[accepted] += 1
        place = min(length, place + accepted + 1)
        said.append(place)
    meta = {"spec_verify_ct": sum(steps), "spec_correct_drafts_histogram": steps} if length > 1 else {}
    return [{"meta_info": {**meta, "completion_tokens": count}} for count in said]


def test_served_counts_are_replays():
    generator = random.Random(0)
    for _ in range(300):
        length, draft_tokens = generator.randint(1, 30), generator.randint(1, 5)
        hits = [[int(generator.random() < 0.7) for _ in range(draft_tokens)] for _ in range(length + 1)]
        tally, exact = tally_of("u", serve(hits, length, draft_tokens), length, draft_tokens)
        assert exact
        # walk's slots count from the prompt's last token, at which the first draft of all stands.
        assert tally == walk(hits, 1, length + 1, draft_tokens)


def test_without_the_last_event_the_totals_are_right():
    steps = [4, 2, 1, 2]
    meta = {"spec_verify_ct": 9, "spec_correct_drafts_histogram": steps, "completion_tokens": 18}
    tally, exact = tally_of("u", [{"meta_info": meta}], 18, 3)
    assert not exact
    assert (tally.rounds, sum(tally.accepted)) == (9, 9)


@pytest.mark.parametrize(
    "meta",
    [
        {},
        {"spec_verify_ct": 3},
        {"spec_verify_ct": 3, "spec_correct_drafts_histogram": [1, 1]},
        {"spec_verify_ct": 3, "spec_correct_drafts_histogram": [3, 0, 0, 0, 0]},
        {"spec_verify_ct": 3, "spec_correct_drafts_histogram": [3]},
    ],
)
def test_counts_that_cannot_be_are_refused(meta):
    with pytest.raises(UserError, match=r"lack|make no answer"):
        tally_of("u", [{"meta_info": meta}], 9, 3)
