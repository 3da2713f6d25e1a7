"""The unroll and its loss against the recipe written out slot by slot."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import reference
from eyas.draft import loss, plain
from eyas.draft.chains import chain_lengths
from eyas.draft.config import DraftConfig
from eyas.draft.loss import Teacher, unrolled_loss
from eyas.draft.model import DraftModel
from eyas.draft.unroll import unroll
from eyas.store.shard import Sample
from eyas.train.packing import pack

V, D, H = 23, 11, 12
SHAPE = {"heads": 4, "groups": 2, "size": 6, "theta": 5000.0, "eps": 1e-5}


def make_draft(fc_norm: bool = False, norm_output: bool = False, seed: int = 0) -> DraftModel:
    torch.manual_seed(seed)
    rope = {"rope_type": "default", "rope_theta": SHAPE["theta"]}
    config = DraftConfig(H, 20, 4, 2, 6, V, D, SHAPE["eps"], rope, 128, fc_norm=fc_norm, norm_output=norm_output)
    draft = DraftModel(config, nn.Embedding(V, H)).double()
    draft.inverse_frequencies = 5000.0 ** (-torch.arange(0, 6, 2, dtype=torch.float64) / 6)
    draft.set_vocabulary(torch.randperm(V)[:D].sort().values)
    for parameter in draft.parameters():
        if parameter.requires_grad:
            parameter.data.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.3)
    return draft


def make_documents(masks: list[list[bool]], seed: int = 0):
    torch.manual_seed(seed + 100)
    return [
        (
            torch.randint(0, V, (len(mask),)),
            torch.tensor(mask),
            torch.randn(len(mask), 3 * H, dtype=torch.float64),
            torch.randn(len(mask), H, dtype=torch.float64),
            torch.randint(0, V, (len(mask),)),
        )
        for mask in masks
    ]


def packed(documents, steps):
    samples = [Sample(str(i), *d) for i, d in enumerate(documents)]
    return pack(samples, steps, torch.device("cpu"), torch.float64)


def batch_loss(draft, batch, head, counts, decay=0.8):
    teacher = Teacher(batch.last, draft.t2d[batch.argmax], head[draft.target_ids])
    return unrolled_loss(draft, batch.chains, list(unroll(draft, batch.chains, batch.aux)), teacher, counts, decay)


def packed_loss(draft, documents, head, steps, decay=0.8):
    batch = packed(documents, steps)
    return batch_loss(draft, batch, head, batch.chains.counts, decay)


MASKS = [
    [False, False, True, True, True, True, True],
    [False, True, True, False, True, True, True, True, False, False],  # holes, and an end that is no answer
    [False, False, False],  # nothing counts
    [True] * 6,
    [False, True],
]


@pytest.mark.parametrize(("fc_norm", "norm_output"), [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("small", [False, True])
def test_loss_and_every_gradient_equal_the_reference(fc_norm, norm_output, small, monkeypatch):
    if small:  # several parts of everything that is done in parts
        monkeypatch.setattr(plain, "BLOCK", 2)
        monkeypatch.setattr(loss, "PART", 3 * D)
    draft = make_draft(fc_norm, norm_output)
    documents, head = make_documents(MASKS), torch.randn(V, H, dtype=torch.float64)
    packed_loss(draft, documents, head, 4).backward()
    named = {name: p for name, p in draft.named_parameters() if p.requires_grad}
    ours = {name: p.grad.clone() for name, p in named.items()}
    value = packed_loss(draft, documents, head, 4)
    draft.zero_grad()
    shape = reference.Shape(**SHAPE, fc_norm=fc_norm, norm_output=norm_output)
    wanted = reference.loss(named, shape, draft.embed_tokens.weight, head, draft.target_ids, documents, 4, 0.8)
    torch.testing.assert_close(value, wanted, rtol=1e-12, atol=0)
    wanted.backward()
    for name, p in named.items():
        torch.testing.assert_close(ours[name], p.grad, rtol=1e-9, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=7), min_size=1, max_size=3), st.integers(1, 5))
def test_any_masks_give_the_reference_loss(masks, steps):
    draft = make_draft(seed=3)
    documents, head = make_documents(masks), torch.randn(V, H, dtype=torch.float64)
    named = dict(draft.named_parameters())
    with torch.no_grad():
        value = packed_loss(draft, documents, head, steps)
        shape = reference.Shape(**SHAPE)
        wanted = reference.loss(named, shape, draft.embed_tokens.weight, head, draft.target_ids, documents, steps, 0.8)
    torch.testing.assert_close(value.double(), wanted, rtol=1e-10, atol=1e-12)


@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=9), min_size=1, max_size=4), st.integers(1, 5))
def test_chain_lengths_follow_the_definition(masks, steps):
    answer = torch.tensor([flag for mask in masks for flag in mask])
    starts = torch.tensor([0] + [len(mask) for mask in masks]).cumsum(0)
    wanted = [sum(reference.counts(mask, t, k) for k in range(steps)) for mask in masks for t in range(len(mask))]
    assert chain_lengths(answer, starts, steps).tolist() == wanted


def test_packing_changes_nothing():
    draft, documents = make_draft(seed=5), make_documents(MASKS, seed=5)
    head = torch.randn(V, H, dtype=torch.float64)
    batches = [packed([d], 3) for d in documents]
    counts = sum(b.chains.counts for b in batches)
    packed_loss(draft, documents, head, 3).backward()
    together = {name: p.grad.clone() for name, p in draft.named_parameters() if p.requires_grad}
    draft.zero_grad()
    apart = 0.0
    for batch in batches:
        value = batch_loss(draft, batch, head, counts)
        if len(batch.chains):
            value.backward()
        apart += float(value.detach())
    assert apart == pytest.approx(float(packed_loss(draft, documents, head, 3).detach()), rel=1e-12)
    for name, gradient in together.items():
        torch.testing.assert_close(draft.get_parameter(name).grad, gradient, rtol=1e-10, atol=1e-13)


def test_a_batch_without_answers_has_no_loss():
    draft, documents = make_draft(), make_documents([[False, False, False]])
    value = packed_loss(draft, documents, torch.randn(V, H, dtype=torch.float64), 3)
    assert float(value) == 0.0
