"""Speculative decoding: lossless whatever the draft, and its acceptance is exactly what replay predicts."""

import pytest
import torch

from eyas.decode.chain import decode
from eyas.decode.replay import tallies
from eyas.draft.config import DraftConfig
from eyas.draft.model import DraftModel
from eyas.draft.start import random
from eyas.engines.answers import to_sample
from eyas.engines.inprocess.generate import answer
from test_inprocess import LAYERS, load, prompts


def make_draft(target, vocabulary=259, seed=0, **switches):
    torch.manual_seed(seed)
    config = DraftConfig.from_target(target.info.config, vocabulary, **switches)
    draft = DraftModel(config, target.embedding)
    ids = torch.arange(259)[torch.randperm(259)[:vocabulary].sort().values]
    draft.set_vocabulary(ids)
    random(draft, target.head[ids], target.model.model.norm.weight, torch.Generator().manual_seed(seed))
    return draft.eval()


def noisy_copy(target, draft):
    """A draft that is right now and then: its layer does little, so it mostly predicts from the target's states."""
    with torch.no_grad():
        draft.fc.weight.zero_()
        draft.fc.weight[:, -target.info.hidden_size :] = torch.eye(target.info.hidden_size)
    return draft


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
@pytest.mark.parametrize("draft_tokens", [1, 3, 5])
@pytest.mark.parametrize("switches", [{}, {"fc_norm": True, "norm_output": True}])
def test_lossless_and_as_predicted(make_tiny, architecture, draft_tokens, switches):
    target = load(make_tiny(architecture))
    draft = noisy_copy(target, make_draft(target, **switches))
    asked = prompts(8, seed=draft_tokens)
    plain = answer(target, asked, 25, capture=torch.float32)
    decoded = decode(target, draft, asked, 25, draft_tokens)
    assert [d.ids for d in decoded] == [a.ids for a in plain]
    useful = [i for i, a in enumerate(plain) if len(a.ids) - a.prompt > 1]
    predicted = tallies(draft, [to_sample(plain[i]) for i in useful], draft_tokens)
    for i, tally in zip(useful, predicted, strict=True):
        assert (decoded[i].tally.rounds, decoded[i].tally.reached, decoded[i].tally.accepted) == (
            tally.rounds,
            tally.reached,
            tally.accepted,
        )


def test_a_reduced_vocabulary_is_lossless(tiny_llama):
    target = load(tiny_llama)
    draft = make_draft(target, vocabulary=20)
    asked = prompts(5)
    assert [d.ids for d in decode(target, draft, asked, 15, 3)] == [a.ids for a in answer(target, asked, 15)]


def test_one_new_token(tiny_llama):
    target = load(tiny_llama)
    asked = prompts(3)
    decoded = decode(target, make_draft(target), asked, 1, 3)
    assert [d.ids for d in decoded] == [a.ids for a in answer(target, asked, 1)]
    assert all(d.tally.rounds == 0 for d in decoded)
    assert target.layers == LAYERS
