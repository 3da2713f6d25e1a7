"""Sampling with a draft: the answers' distribution is the target's own, and the share of accepted guesses is theirs."""

import math
from collections import Counter

import pytest
import torch

from eyas.decode.chain import decode
from eyas.decode.sample import Sampled
from test_chain import make_draft, noisy_copy
from test_inprocess import load

ROWS, TOKENS = 3000, 3


def chi_square(counts, probabilities, total):
    """Pearson's statistic and its degrees of freedom, rare tokens put together."""
    statistic, freedom, rare, rare_count = 0.0, -1, 0.0, 0
    for token, p in enumerate(probabilities):
        if p * total < 5:
            rare, rare_count = rare + p, rare_count + counts.get(token, 0)
            continue
        statistic += (counts.get(token, 0) - p * total) ** 2 / (p * total)
        freedom += 1
    if rare * total >= 5:
        statistic += (rare_count - rare * total) ** 2 / (rare * total)
        freedom += 1
    return statistic, freedom


def require_like(said, probabilities):
    """Five standard deviations of a chi-square: one in a million or so."""
    statistic, freedom = chi_square(Counter(said), probabilities, len(said))
    assert freedom >= 1
    assert statistic < freedom + 5 * math.sqrt(2 * freedom), (statistic, freedom)


@pytest.fixture(scope="module")
def target(tiny_llama):
    return load(tiny_llama)


@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_answers_have_the_targets_distribution(target, temperature):
    """Every second token, after each first token that is common: drawn, accepted or replaced, it is the target's."""
    draft = noisy_copy(target, make_draft(target))
    prompt = [5, 6, 7, 9]
    judge = Sampled(target, temperature, torch.Generator().manual_seed(1))
    decoded = [d for _ in range(3) for d in decode(target, draft, [prompt] * (ROWS // 3), TOKENS, 2, judge=judge)]
    answers = [tuple(d.ids[d.prompt :]) for d in decoded]

    def exact(behind):
        out = target.run(torch.tensor([prompt + list(behind)]), target.cache(1, 8))
        return torch.softmax((out.last[0, -1] @ target.head.T).double() / temperature, -1).tolist()

    require_like([a[0] for a in answers], exact(()))
    common = [token for token, n in Counter(a[0] for a in answers).most_common(3) if n >= 200]
    assert common
    for first in common:
        require_like([a[1] for a in answers if a[0] == first and len(a) > 1], exact((first,)))
    assert 0 < sum(d.tally.accepted[0] for d in decoded) < sum(d.tally.rounds for d in decoded)


def test_guesses_are_accepted_as_often_as_the_target_would_say_them(target):
    states = target.run(torch.tensor([[5, 6, 7]]), target.cache(1, 4)).last[0, -1]
    p = torch.softmax(states @ target.head.T, -1)
    guess = int(p.argmax())
    judge = Sampled(target, 1.0, torch.Generator().manual_seed(2))
    asked = states.expand(ROWS, 2, -1)
    accepted, tokens = judge(asked, torch.full((ROWS, 1), guess))
    share, chance = float(accepted.float().mean()), float(p[guess])
    assert abs(share - chance) < 5 * math.sqrt(chance * (1 - chance) / ROWS)
    assert (tokens[accepted == 0, 0] != guess).all()
    assert (tokens[accepted == 1, 0] == guess).all()


def test_a_low_temperature_is_greedy(target):
    draft = noisy_copy(target, make_draft(target))
    judge = Sampled(target, 1e-4, torch.Generator().manual_seed(3))
    asked = [[5, 6, 7, 9], [8, 9, 10]]
    assert [d.ids for d in decode(target, draft, asked, 12, 3, judge=judge)] == [
        d.ids for d in decode(target, draft, asked, 12, 3)
    ]
