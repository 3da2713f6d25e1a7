"""Proofs: a right capture passes, and each fault that engines are known for is caught by the proof made for it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from eyas.capture import proofs
from eyas.capture.proofs import Proofs, require_share
from eyas.errors import UserError
from eyas.store.manifest import Quarantined
from eyas.store.shard import Sample

HIDDEN, VOCAB, DEPTH, LAYERS = 32, 97, 8, (2, 4, 5)


class Target:
    """A small causal residual network with a final norm and a head; greedy, and its first token is a sink."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        random = torch.Generator().manual_seed(5)
        self.dtype = dtype
        self.embedding = torch.randn(VOCAB, HIDDEN, generator=random).to(dtype)
        self.mix = (torch.randn(DEPTH, HIDDEN, HIDDEN, generator=random) * HIDDEN**-0.5).to(dtype)
        self.head = torch.randn(VOCAB, HIDDEN, generator=random).to(dtype)
        self.places = torch.randn(500, HIDDEN, generator=random).to(dtype) * 2
        self.gain = torch.exp(torch.randn(HIDDEN, generator=random)).to(dtype)

    def states(self, ids: torch.Tensor, chunk: int = 1) -> list[torch.Tensor]:
        """All hidden states [t, H], then the normed one. `chunk` changes the order of sums only."""
        hidden = self.embedding[ids] + self.places[: len(ids)]
        hidden[0] *= 300
        out = [hidden]
        steps = torch.arange(1, len(ids) + 1, dtype=self.dtype)[:, None]
        for mix in self.mix:
            mean = hidden.cumsum(0) / steps
            part = [slice(None, HIDDEN // 2), slice(HIDDEN // 2, None)] if chunk > 1 else [slice(None)]
            hidden = hidden + torch.tanh(sum(((hidden + mean)[:, s] @ mix[s] for s in part), torch.zeros(())))
            out.append(hidden)
        scale = hidden.float().square().mean(-1, keepdim=True).rsqrt()
        return [*out, (hidden.float() * scale).to(self.dtype) * self.gain]

    def sample(self, key: str, ids: torch.Tensor, prompt: int, layers: tuple[int, ...] = LAYERS, **how: int) -> Sample:
        states = self.states(ids, **how)
        last = states[-1]
        return Sample(
            key,
            ids,
            torch.arange(len(ids)) >= prompt,
            torch.cat([states[layer] for layer in layers], -1),
            last,
            (last @ self.head.T).argmax(-1),
        )

    def answer(self, seed: int, prompt: int = 5, tokens: int = 12) -> Sample:
        """A random prompt and its greedy answer."""
        ids = torch.randint(0, VOCAB, (prompt,), generator=torch.Generator().manual_seed(seed))
        for _ in range(tokens):
            ids = torch.cat([ids, (self.states(ids)[-1][-1] @ self.head.T).argmax()[None]])
        return self.sample(f"s{seed}", ids, prompt)


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=str)
def target(request: pytest.FixtureRequest) -> Target:
    return Target(request.param)


@pytest.fixture(scope="module")
def good(target: Target) -> Sample:
    return target.answer(0)


def spoiled(tensor: torch.Tensor, row: int, value: Any, columns: slice = slice(None)) -> torch.Tensor:
    """A copy [t] or [t, H] with one row changed, or a part of it."""
    copy = tensor.clone()
    copy[row][columns if copy.dim() == 2 else ...] = value
    return copy


def test_right_captures_pass(target: Target) -> None:
    checks = Proofs(target.head)
    for seed in range(25):
        sample = target.answer(seed, prompt=2 + seed % 5, tokens=4 + seed % 9)
        assert checks.check(sample) is None
        again = target.sample(sample.key, sample.ids, 2, chunk=2)
        assert checks.check_again(sample, again) is None
    counts = checks.counts()
    assert {name: count["checked"] for name, count in counts.items()} == dict.fromkeys(counts, 25)
    assert not any(count["failed"] for count in counts.values())
    assert counts["rows"]["worst"] is None
    assert 1 <= counts["norms"]["worst"] < proofs.NORM_FACTOR
    assert 0 < counts["recaptured"]["worst"] <= proofs.RECAPTURE_TOLERANCE[target.dtype]


def test_features_of_a_float32_target_stored_in_bfloat16_pass() -> None:
    target = Target()
    for seed in range(10):
        whole = target.answer(seed)
        half = replace(whole, aux=whole.aux.bfloat16(), last=whole.last.bfloat16())
        checks = Proofs(target.head)
        assert checks.check(half) is None
        assert checks.check_again(half, whole) is None


FAULTS: dict[str, tuple[str, Callable[[Sample], Sample]]] = {
    "a row of aux short": ("rows: aux", lambda s: replace(s, aux=s.aux[:-1])),
    "a row of last short": ("rows: last", lambda s: replace(s, last=s.last[1:])),
    "a layer missing": ("rows: aux", lambda s: replace(s, aux=s.aux[:, : 2 * HIDDEN])),
    "no tokens": ("rows: no tokens", lambda s: Sample("x", s.ids[:0], s.answer, s.aux, s.last, s.argmax)),
    "id of the vocabulary's size": ("ids: the id 97 at position 3", lambda s: replace(s, ids=spoiled(s.ids, 3, VOCAB))),
    "negative id": ("ids: the id -1 at position 0", lambda s: replace(s, ids=spoiled(s.ids, 0, -1))),
    "greedy choice out of range": ("ids: the greedy choice -2", lambda s: replace(s, argmax=spoiled(s.argmax, 4, -2))),
    "nothing supervised": ("supervised", lambda s: replace(s, answer=torch.zeros_like(s.answer))),
    "only the last token": ("supervised", lambda s: replace(s, answer=torch.arange(len(s.ids)) == len(s.ids) - 1)),
    "NaN": ("finite: the second layer .* 1 rows, the first at position 6", lambda s: replace(
        s, aux=spoiled(s.aux, 6, float("nan"), slice(HIDDEN, HIDDEN + 1)))),
    "infinity": ("finite: the last state", lambda s: replace(s, last=spoiled(s.last, 2, float("inf")))),
    "a row of zeros": ("constant: the last state is zero in 1 rows", lambda s: replace(s, last=spoiled(s.last, 2, 0))),
    "one layer's row of zeros": ("constant: the third layer is zero", lambda s: replace(
        s, aux=spoiled(s.aux, 9, 0, slice(2 * HIDDEN, None)))),
    "one row everywhere": ("constant: the first layer is the same", lambda s: replace(
        s, aux=s.aux[3:4].expand_as(s.aux))),
    "rows shifted by one": ("greedy", lambda s: replace(s, last=s.last.roll(1, 0))),
    "choices shifted by one": ("greedy", lambda s: replace(s, argmax=s.argmax.roll(1, 0))),
    "choice unknown": ("greedy: .* position 7 is not known", lambda s: replace(s, argmax=spoiled(s.argmax, 7, -1))),
    "answer not greedy": ("follows", lambda s: replace(s, ids=spoiled(s.ids, 9, (s.ids[9] + 1) % VOCAB))),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_faults(target: Target, good: Sample, fault: str) -> None:
    message, spoil = FAULTS[fault]
    checks = Proofs(target.head)
    reason = checks.check(spoil(good))
    assert reason is not None
    name = message.partition(":")[0]
    assert reason.startswith(name + ": ")
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(reason)
    assert checks.counts()[name]["failed"] == 1


def test_unknown_choices_where_nothing_needs_them_pass(target: Target, good: Sample) -> None:
    choice = good.argmax.clone()
    choice[:5] = -1
    choice[-1] = -1
    assert Proofs(target.head).check(replace(good, argmax=choice)) is None


def test_answers_that_are_not_greedy_by_intent(target: Target, good: Sample) -> None:
    ids = spoiled(good.ids, 9, (good.ids[9] + 1) % VOCAB)
    checks = Proofs(target.head, greedy_answers=False)
    assert checks.check(target.sample("x", ids, 5)) is None
    assert "follows" not in checks.counts()


def test_the_state_before_the_final_norm(target: Target, good: Sample) -> None:
    reason = Proofs(target.head).check(replace(good, last=target.states(good.ids)[-2]))
    assert reason is not None
    assert reason.startswith("greedy: ")


def test_a_neighbours_rows(target: Target, good: Sample) -> None:
    """In `last`: the head tells. With its choices too: the answer does not follow. In `aux`: a second capture tells."""
    other = target.answer(1)
    part = slice(8, 14)
    checks = Proofs(target.head)

    last, argmax, aux = good.last.clone(), good.argmax.clone(), good.aux.clone()
    last[part], argmax[part], aux[part] = other.last[part], other.argmax[part], other.aux[part]
    assert str(checks.check(replace(good, last=last))).startswith("greedy: ")
    assert str(checks.check(replace(good, last=last, argmax=argmax))).startswith("follows: ")
    assert checks.check(replace(good, aux=aux)) is None
    assert str(checks.check_again(replace(good, aux=aux), good)).startswith("recaptured: the first layer")


def test_one_foreign_row_behind_a_huge_first_token(target: Target) -> None:
    """The first token's norm is some hundred times the others'; a plain Frobenius error would be within 3e-2."""
    good = target.sample("x", torch.arange(400) % VOCAB, 5)
    aux = good.aux.clone()
    aux[200] = aux[100]
    plain = (aux - good.aux).float().norm() / good.aux.float().norm()
    assert plain < 3e-2
    assert Proofs(target.head).check_again(replace(good, aux=aux), good) is not None


@pytest.mark.parametrize("layers", [(3, 4, 5), (2, 3, 5), (2, 4, 6), (4, 2, 5)])
def test_wrong_layers(target: Target, good: Sample, layers: tuple[int, ...]) -> None:
    wrong = target.sample("x", good.ids, 5, layers)
    checks = Proofs(target.head)
    assert checks.check(wrong) is None
    reason = checks.check_again(wrong, good)
    assert reason is not None
    place = next(i for i in range(3) if layers[i] != LAYERS[i])
    assert reason.startswith(f"recaptured: {proofs.LAYERS[place]} differs by ")
    assert checks.counts()["recaptured"]["worst"] > 3e-2


def test_partial_sums_of_one_rank(target: Target, good: Sample) -> None:
    assert Proofs(target.head).check_again(replace(good, aux=good.aux / 2), good) is not None


def test_rows_missing_in_the_second_capture(target: Target, good: Sample) -> None:
    reason, _ = proofs.recaptured(replace(good, aux=good.aux[:-1]), good)
    assert reason is not None
    with pytest.raises(AssertionError):
        proofs.recaptured(good, target.answer(1))


def test_not_finite_in_the_second_capture(good: Sample) -> None:
    reason, _ = proofs.recaptured(good, replace(good, last=spoiled(good.last, 3, float("nan"))))
    assert reason is not None


def test_norms_out_of_range(target: Target) -> None:
    checks = Proofs(target.head)
    for seed in range(proofs.NORM_SAMPLES):
        assert checks.check(target.answer(seed)) is None
    for factor in (20.0, 1 / 20):
        sample = target.answer(99)
        reason = checks.check(replace(sample, aux=sample.aux * factor))
        assert reason is not None
        assert reason.startswith("norms: the first layer has a median norm of ")
    assert checks.counts()["norms"] == {"checked": 18, "failed": 2, "worst": pytest.approx(20, rel=0.9)}
    assert checks.check(target.answer(100)) is None


def test_a_tie_is_no_failure() -> None:
    """Two tokens with equal rows in the head, and a choice that rounding decided."""
    for dtype in (torch.float32, torch.bfloat16):
        target = Target(dtype)
        target.head[5] = target.head[7]
        target.head[8] = target.head[7] * (1 + torch.finfo(dtype).eps)
        last = target.head[7:8].expand(6, HIDDEN) + 0
        sample = Sample("x", torch.full((6,), 5), torch.ones(6, dtype=torch.bool), last, last, torch.full((6,), 7))
        for choice in (5, 7, 8):
            tied = replace(sample, argmax=torch.full((6,), choice))
            assert proofs.greedy(tied, target.head)[0] is None
            assert proofs.follows(tied, target.head)[0] is None
        wrong, gap = proofs.greedy(replace(sample, argmax=torch.full((6,), 9)), target.head)
        assert wrong is not None
        assert gap > 1
        assert "token 9 is" in wrong


def test_equal_tokens_may_have_equal_rows() -> None:
    row = torch.randn(1, HIDDEN, generator=torch.Generator().manual_seed(0))
    ids = torch.full((4,), 3)
    sample = Sample("x", ids, ids > 0, row.repeat(4, 3), row.repeat(4, 1), ids)
    assert proofs.constant(sample) is None
    assert proofs.constant(replace(sample, ids=torch.tensor([3, 3, 4, 3]))) is not None
    assert (
        proofs.constant(Sample("x", *(t[:1] for t in (sample.ids, sample.answer, sample.aux, sample.last, ids))))
        is None
    )


def test_the_share_of_failures() -> None:
    failed = [Quarantined(f"s{i}", f"rows: reason {i}") for i in range(5)]
    require_share([], 0, 0.0)
    require_share(failed, 500, 0.01)
    with pytest.raises(UserError) as error:
        require_share(failed, 499, 0.01)
    assert str(error.value) == (
        "5 of 499 samples failed their proofs, more than capture.max_quarantined = 0.01 allows: mend the capture "
        "(s0: rows: reason 0; s1: rows: reason 1; s2: rows: reason 2; …)"
    )
    with pytest.raises(UserError, match=r"1 of 9 .*\(s0: rows: reason 0\)$"):
        require_share(failed[:1], 9, 0.0)
