"""Training: overfits to accept everything, resumes bit for bit, stops on numbers that are none."""

import pytest
import torch

from eyas.config import Train
from eyas.decode.chain import decode
from eyas.decode.replay import tallies
from eyas.draft import checkpoint, start
from eyas.engines.answers import to_sample
from eyas.engines.inprocess.generate import answer
from eyas.errors import UserError
from eyas.train.loop import Trainer, evenly
from eyas.train.packing import group, pack, plan
from test_chain import make_draft
from test_inprocess import load, prompts

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def target(tiny_llama):
    return load(tiny_llama)


@pytest.fixture(scope="module")
def samples(target):
    answered = answer(target, prompts(6), 24, capture=torch.float32)
    return [to_sample(a) for a in answered if len(a.ids) - a.prompt > 4]


def trainer(target, steps, seed=0, **config):
    draft = make_draft(target, seed=seed).train()
    return Trainer(draft, target.head[draft.target_ids].clone(), Train(**config), steps)


def test_one_sample_is_learned_until_all_is_accepted(target, samples):
    training = trainer(target, 150, ttt_steps=3, learning_rate=3e-3, warmup=0.05)
    sample = samples[0]
    batch = pack([sample], 3, CPU, torch.float32)
    for _ in range(150):
        training.step(batch)
    tally = tallies(training.draft, [sample], 3)[0]
    assert tally.accepted == tally.reached
    prompt = sample.ids[: int((~sample.answer).sum())].tolist()
    decoded = decode(target, training.draft, [prompt], 24, 3)[0]
    assert decoded.ids == sample.ids.tolist()
    assert decoded.tally.accepted == decoded.tally.reached == tally.accepted


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_ten_steps_equal_five_and_five_resumed(target, samples, tmp_path, optimizer):
    order = plan([len(s.ids) for s in samples], 60, 5, seed=3)[:10]
    batches = [pack([samples[i] for i in part], 2, CPU, torch.float32) for part in order]
    whole = trainer(target, 10, ttt_steps=2, optimizer=optimizer)
    losses = [whole.step(batch).loss for batch in batches]
    half = trainer(target, 10, ttt_steps=2, optimizer=optimizer)
    for batch in batches[:5]:
        half.step(batch)
    half.save(tmp_path / "state")
    resumed = trainer(target, 10, seed=9, ttt_steps=2, optimizer=optimizer)  # its own beginning is another
    resumed.restore(tmp_path / "state")
    assert [resumed.step(batch).loss for batch in batches[5:]] == losses[5:]
    assert checkpoint.digest(resumed.draft) == checkpoint.digest(whole.draft)


def test_a_state_of_another_schedule_is_refused(target, tmp_path):
    trainer(target, 10).save(tmp_path / "state")
    with pytest.raises(UserError, match="10 steps, not 20"):
        trainer(target, 20).restore(tmp_path / "state")
    data = (tmp_path / "state").read_bytes()
    (tmp_path / "state").write_bytes(data[:-100])
    with pytest.raises(UserError, match="damaged training state"):
        trainer(target, 10).restore(tmp_path / "state")


def test_a_state_that_is_no_number_stops_at_once(target, samples):
    batch = pack(samples[:1], 7, CPU, torch.float32)
    batch.aux[3, 5] = float("nan")
    with pytest.raises(UserError, match=r"loss nan.*step 0.*samples abc.*learning_rate"):
        trainer(target, 10).step(batch, names="abc")


def test_learning_rate_warms_up_and_falls_to_its_floor(target):
    training = trainer(target, 100, learning_rate=1.0, warmup=0.1, final_learning_rate=0.02)
    rates = [training.learning_rate(i) for i in range(100)]
    assert rates[0] == pytest.approx(0.1, rel=0.01)
    assert max(rates) == pytest.approx(1.0, rel=0.03)
    assert rates[-1] == pytest.approx(0.02, rel=0.05)
    assert sorted(rates[10:], reverse=True) == rates[10:]


def test_fitted_start_beats_random_before_any_training(target):
    """The tiny target's states are few enough for the regression to predict its own training positions."""
    answered = answer(target, prompts(24, seed=7), 40, capture=torch.float32)
    samples = [to_sample(a) for a in answered if len(a.ids) - a.prompt > 1]
    batch = pack(samples, 1, CPU, torch.float32)

    def accepted(draft):
        return sum(sum(t.accepted) for t in tallies(draft, samples, 3))

    draft = make_draft(target)
    before = accepted(draft)
    rows = batch.chains.state_row
    assert rows is not None
    start.fitted(draft, batch.aux[rows], batch.chains.next_ids, batch.last)
    assert accepted(draft) > 2 * before + 20


def test_plan_covers_every_sample_once_an_epoch():
    lengths = [5, 30, 7, 8, 50, 3, 9]
    batches = plan(lengths, 32, 2.5, seed=1)
    seen = [i for batch in batches for i in batch]
    assert sorted(seen[:7]) == sorted(seen[7:14]) == list(range(7))
    assert len(seen) == 14 + 4
    assert all(sum(lengths[i] for i in batch) <= 32 or len(batch) == 1 for batch in batches)
    assert plan(lengths, 32, 2.5, seed=1) == batches
    assert plan(lengths, 32, 2.5, seed=2) != batches
    assert group([4, 4, 4], 8) == [[0, 1], [2]]


def test_evenly_includes_the_last_step():
    assert evenly(4, 10) == {2, 5, 8, 10}
    assert evenly(10, 3) == {1, 2, 3}


def test_bfloat16_products_train_with_float32_masters(target, samples):
    draft = make_draft(target).train()
    training = Trainer(draft, target.head.clone(), Train(ttt_steps=3, learning_rate=2e-3), 20, torch.bfloat16)
    batch = pack(samples[:2], 3, CPU, torch.bfloat16)
    losses = [training.step(batch).loss for _ in range(20)]
    assert losses[-1] < 0.8 * losses[0]
    assert all(p.dtype == torch.float32 for p in draft.parameters())
