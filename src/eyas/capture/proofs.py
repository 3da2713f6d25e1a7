"""Proofs: a capture is worth nothing until it is shown to be right.

Each proof is a function of a sample that returns the reason for which the sample is refused, or None; some also return
how near to their limit it came. Engines lose rows, give the rows of another request, or none, without an error, and
what is trained on those looks healthy [sglang 8066, 4997, 32089, vLLM-Hook 22]. `Proofs` runs them all and counts.
"""

import statistics
import threading
from bisect import insort
from collections.abc import Sequence
from typing import Any

import torch

from eyas.errors import UserError
from eyas.store.manifest import Quarantined
from eyas.store.shard import Sample

RECAPTURE_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""Relative error between two captures of the same ids: other batches and kernels, the same states.

Measured on SmolLM2-135M (30 layers), in chunks or decoded in a batch, against one plain pass: 1e-6 in float32; in
bfloat16 up to 0.024 for a layer and 0.09 for a row. Another layer differs by 0.2 and more, another row by 0.3 and more.
"""
ROW_FACTOR = 5.0
"""A single row may differ by this many times the tolerance."""
TIE_FACTOR = 2.0
"""Logits closer than this many resolutions are a tie."""
NORM_FACTOR = 8.0
NORM_SAMPLES = 16
"""Samples before the norms are judged."""
NORM_MEMORY = 1001
"""Samples after which the running median is settled."""
PROBES = 4
"""Rows that have to be equal before all of them are compared."""
POSITIONS = 8
"""Positions of a sample at which the head is applied."""
LAYERS = ("the first layer", "the second layer", "the third layer", "the last state")


def rows(sample: Sample, hidden: int) -> str | None:
    """Every tensor has a row for each token, and states are `hidden` wide [sglang 8066]."""
    tokens = len(sample.ids)
    if tokens == 0:
        return "no tokens"
    for name, tensor, shape in (
        ("aux", sample.aux, (tokens, 3 * hidden)),
        ("last", sample.last, (tokens, hidden)),
        ("argmax", sample.argmax, (tokens,)),
        ("answer", sample.answer, (tokens,)),
    ):
        if tensor.shape != shape:
            return f"{name} has the shape {list(tensor.shape)} where {tokens} tokens need {list(shape)}"
    return None


def ids(sample: Sample, vocab: int) -> str | None:
    """Token ids are 0 to vocab-1, greedy choices too, or -1 [sglang PR 8383]."""
    for name, values, least in (("id", sample.ids, 0), ("greedy choice", sample.argmax, -1)):
        wrong = ((values < least) | (values >= vocab)).nonzero().flatten()
        if len(wrong):
            position = int(wrong[0])
            return f"the {name} {int(values[position])} at position {position} is outside the vocabulary of {vocab}"
    return None


def supervised(sample: Sample) -> str | None:
    """At least one slot counts: it is followed by two answer tokens, the one it reads and the one it predicts."""
    if not bool((sample.answer[1:-1] & sample.answer[2:]).any()):
        return "no answer token that is followed by another"
    return None


def finite(sample: Sample) -> str | None:
    """No NaN and no infinity [speculators 615]."""
    for name, states in zip(LAYERS, _layers(sample), strict=True):
        wrong = (~states.isfinite().all(-1)).nonzero().flatten()
        if len(wrong):
            return f"{name} is not finite in {len(wrong)} rows, the first at position {int(wrong[0])}"
    return None


def constant(sample: Sample) -> str | None:
    """No row of zeros; rows not all the same [vllm 46301], unless the tokens are (attention keeps such rows equal)."""
    for name, states in zip(LAYERS, _layers(sample), strict=True):
        zero = (~states.any(-1)).nonzero().flatten()
        if len(zero):
            return f"{name} is zero in {len(zero)} rows, the first at position {int(zero[0])}"
        if bool((sample.ids != sample.ids[0]).any()) and bool((states == states[0]).all()):
            return f"{name} is the same in all {len(states)} rows"
    return None


def row_norms(sample: Sample) -> torch.Tensor:
    """Norm of every row of every layer, float32 [4, t], in one pass over the states: what most proofs need to see.

    Summed in float32 and rounded to the states' dtype: to take bfloat16 states to float32 first is twelve times slower.
    """
    return torch.stack([states.norm(dim=-1).float() for states in _layers(sample)])


def _striking(sample: Sample, norms: torch.Tensor) -> bool:
    """Whether `finite` and `constant` have to look at every number; else both pass."""
    if not bool((norms.isfinite() & (norms > 0)).all()):
        return True
    few = torch.linspace(0, len(sample.ids) - 1, PROBES).long()
    return any(bool((states[few] == states[0]).all()) for states in _layers(sample))


class Norms:
    """Row norms keep to the range that earlier samples showed: layer by layer, the sample's median is within a factor
    of 8 of the running median over samples. Medians, because the first token's norm is often huge (attention sink).
    """

    def __init__(self) -> None:
        self._seen: list[list[float]] = [[] for _ in LAYERS]

    def check(self, sample: Sample, norms: torch.Tensor | None = None) -> tuple[str | None, float | None]:
        """(reason, the largest factor); both None for the first samples, which only set the range.

        `norms`: what `row_norms` gives, where it is known.
        """
        reason, worst = None, None
        medians = (row_norms(sample) if norms is None else norms).median(-1).values.tolist()
        for name, norm, seen in zip(LAYERS, medians, self._seen, strict=True):
            if len(seen) >= NORM_SAMPLES:
                usual = statistics.median(seen)
                factor = max(norm / usual, usual / norm)
                worst = max(worst or 0.0, factor)
                if factor > NORM_FACTOR and reason is None:
                    reason = f"{name} has a median norm of {norm:.3g}, usual is {usual:.3g}"
            if len(seen) < NORM_MEMORY:
                insort(seen, norm)
        return reason, worst


def judged(sample: Sample) -> torch.Tensor:
    """The positions, int64 [n], at which `greedy` compares: evenly spread where an answer goes on, and at its end."""
    wanted = sample.argmax >= 0
    wanted[:-1] &= sample.answer[1:]
    return _spread(wanted.nonzero().flatten())


def best(last: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
    """`argmax(head @ last)` of states `last` [n, H]: int64 [n], where the head is. The head stays where it is."""
    found: torch.Tensor = (last.to(head.device, head.dtype) @ head.T).argmax(-1)
    return found


def greedy(
    sample: Sample, head: torch.Tensor, gaps: torch.Tensor | None = None, *, decoded: bool = False
) -> tuple[str | None, float]:
    """The last state is the one that the greedy choice came from: `argmax(head @ last)` at evenly spread positions.

    `head` [V, H], without a bias; scaling and soft-cap do not move an argmax. A last state from before the final norm,
    of another layer or of another request does not pass. Returns (reason, largest gap in tolerances): see `_gaps`; the
    resolution is that of the coarser dtype of states and head. A choice that training needs may not be unknown (-1).
    `gaps`: what `greedy_gaps` gives, where it was computed for many samples at once.
    `decoded`: the choices are the answer itself, which was decoded in another pass than the states come from; they may
    differ by the tolerance of a second capture, save for the last one, which came with the states.
    """
    choice = sample.argmax
    unknown = (sample.answer[:-1] & sample.answer[1:] & (choice[:-1] < 0)).nonzero().flatten()
    if len(unknown):
        return f"the greedy choice at position {int(unknown[0])} is not known", 0.0
    if gaps is None:
        (gaps,) = greedy_gaps([sample], head, decoded)
    return _judge(judged(sample), choice, gaps, "the head does not give the greedy choice")


def greedy_gaps(samples: Sequence[Sample], head: torch.Tensor, decoded: bool) -> list[torch.Tensor]:
    """For each sample the gaps [n] at its `judged` positions; the head is read once for all of them."""
    positions = [judged(sample) for sample in samples]
    noises = [_noise(sample, head, at, decoded) for sample, at in zip(samples, positions, strict=True)]
    last = torch.cat([sample.last[at] for sample, at in zip(samples, positions, strict=True)])
    choice = torch.cat([sample.argmax[at] for sample, at in zip(samples, positions, strict=True)])
    return list(_gaps(last, choice, head, torch.cat(noises)).split([len(at) for at in positions]))


def _noise(sample: Sample, head: torch.Tensor, positions: torch.Tensor, decoded: bool) -> torch.Tensor:
    """The relative error [n] that a state may have at each of `positions`; see `greedy`."""
    coarser = _coarser(sample.last.dtype, head.dtype)
    noise = torch.full((len(positions),), torch.finfo(coarser).eps)
    if decoded:
        noise[positions < len(sample.argmax) - 1] = RECAPTURE_TOLERANCE[coarser]
    return noise


def follows(sample: Sample, head: torch.Tensor) -> tuple[str | None, float]:
    """A greedy answer goes on with the greedy choice: argmax[i] == ids[i+1] wherever ids[i+1] belongs to an answer.

    The answer may come from another pass than the states, so a tie within the tolerance of a second capture is none
    of our business. Returns (reason, largest gap in tolerances) as `greedy` does.
    """
    choice, following = sample.argmax[:-1], sample.ids[1:]
    positions = _spread((sample.answer[1:] & (choice >= 0) & (choice != following)).nonzero().flatten())
    noise = torch.full((len(positions),), RECAPTURE_TOLERANCE[_coarser(sample.last.dtype, head.dtype)])
    gaps = _gaps(sample.last[positions], following[positions], head, noise)
    return _judge(positions, following, gaps, "the answer does not go on with the greedy choice")


def tied(last: torch.Tensor, claimed: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
    """Whether tokens `claimed` [n] are as good a choice after states `last` [n, H] as the best: bool [n].

    "As good" is a gap between the logits that a second capture of the same ids may show.
    """
    noise = torch.full((len(last),), RECAPTURE_TOLERANCE[_coarser(last.dtype, head.dtype)])
    return _gaps(last, claimed, head, noise) <= 1.0


def recaptured(sample: Sample, other: Sample) -> tuple[str | None, float]:
    """The states equal those of a second capture of the same ids, alone and in the target's own dtype.

    This proof alone sees the aux states: a wrong layer, a partial sum, a neighbour's rows. Compared is, layer by layer,
    the relative Frobenius error with each row scaled to its own norm (root mean square of the rows' relative errors):
    the first token's norm, often a thousand times the others', would hide everything else. Tolerance by the coarser
    dtype, 1e-4 for float32 and 5e-2 for bfloat16; a single row may be off by five times that.
    Returns (reason, largest error of a layer).
    """
    assert torch.equal(sample.ids, other.ids), "another sample was captured again"
    if sample.aux.shape != other.aux.shape or sample.last.shape != other.last.shape:
        return f"states of the shape {list(sample.aux.shape)}, and {list(other.aux.shape)} when captured again", 0.0
    tolerance = RECAPTURE_TOLERANCE[_coarser(sample.aux.dtype, other.aux.dtype)]
    reason, worst = None, 0.0
    for name, states, again in zip(LAYERS, _layers(sample), _layers(other), strict=True):
        errors = (states.float() - again.float()).norm(dim=-1) / again.float().norm(dim=-1)
        error, row = float(errors.square().mean().sqrt()), int(errors.argmax())
        worst = max(worst, error)
        if reason is None and not error <= tolerance:
            reason = f"{name} differs by {error:.2g} from a second capture, above {tolerance:.2g}"
        elif reason is None and not float(errors[row]) <= ROW_FACTOR * tolerance:
            reason = f"{name} differs by {float(errors[row]):.2g} at position {row} from a second capture"
    return reason, worst


class Proofs:
    """All proofs, with counts. Threads may share one.

    `head` [V, H]: the target's lm_head. `greedy_answers`: the answers are the target's own greedy ones. `decoded`: the
    choices are the answers themselves, see `greedy`; then there is nothing that could follow from them.
    """

    def __init__(self, head: torch.Tensor, greedy_answers: bool = True, decoded: bool = False) -> None:
        self._head, self._decoded, self._lock = head.detach(), decoded, threading.Lock()
        self._norms = Norms()
        self._gaps: dict[str, torch.Tensor] = {}
        names = ["rows", "ids", "supervised", "finite", "constant", "norms", "greedy"]
        names += ["follows"] * (greedy_answers and not decoded) + ["recaptured"]
        self._counts: dict[str, dict[str, Any]] = {name: {"checked": 0, "failed": 0, "worst": None} for name in names}

    def look_ahead(self, samples: Sequence[Sample]) -> None:
        """Multiply by the head for samples that `check` will see next, in one product: several times faster."""
        whole = [sample for sample in samples if rows(sample, self._head.shape[1]) is None]
        if whole:
            gaps = greedy_gaps(whole, self._head, self._decoded)
            self._gaps |= {sample.key: part for sample, part in zip(whole, gaps, strict=True)}

    def check(self, sample: Sample) -> str | None:
        """Why the sample is refused, the first proof that failed named first; None: it passed them all."""
        vocab, hidden = self._head.shape
        gaps = self._gaps.pop(sample.key, None)
        if reason := self._count("rows", rows(sample, hidden)):
            return reason
        norms = row_norms(sample)
        striking = _striking(sample, norms)
        return (
            self._count("ids", ids(sample, vocab))
            or self._count("supervised", supervised(sample))
            or self._count("finite", finite(sample) if striking else None)
            or self._count("constant", constant(sample) if striking else None)
            or self._count_norms(sample, norms)
            or self._count("greedy", *greedy(sample, self._head, gaps, decoded=self._decoded))
            or ("follows" in self._counts and self._count("follows", *follows(sample, self._head)))
            or None
        )

    def check_again(self, sample: Sample, other: Sample) -> str | None:
        """Why the sample is refused after `other`, a second capture of the same ids; None: they are the same."""
        return self._count("recaptured", *recaptured(sample, other))

    def counts(self) -> dict[str, dict[str, Any]]:
        """`{name: {checked, failed, worst}}`, for result.json. `worst`: the largest factor of norms, gap in tolerances
        of greedy and follows, relative error of recaptured; None for the proofs that measure nothing.
        """
        return {name: dict(count) for name, count in self._counts.items()}

    def add(self, counts: dict[str, dict[str, Any]]) -> None:
        """Add what an earlier attempt counted."""
        with self._lock:
            for name in self._counts.keys() & counts.keys():
                add_counts(self._counts[name], counts[name])

    def _count_norms(self, sample: Sample, norms: torch.Tensor) -> str | None:
        with self._lock:
            reason, worst = self._norms.check(sample, norms)
        return self._count("norms", reason, worst)

    def _count(self, name: str, reason: str | None, value: float | None = None) -> str | None:
        with self._lock:
            add_counts(self._counts[name], {"checked": 1, "failed": int(reason is not None), "worst": value})
        return None if reason is None else f"{name}: {reason}"


def add_counts(total: dict[str, Any], more: dict[str, Any]) -> None:
    """Add counts of a proof, such as another split's, to `total`."""
    total["checked"] += more["checked"]
    total["failed"] += more["failed"]
    if more["worst"] is not None:
        total["worst"] = max(total["worst"] or 0.0, more["worst"])


def require_share(failed: Sequence[Quarantined], total: int, limit: float) -> None:
    """Refuse a capture of which more than the share `limit` failed [vllm 46301].

    Raises UserError with the counts and the first reasons.
    """
    if len(failed) > limit * total:
        first = "; ".join(f"{sample.key}: {sample.reason}" for sample in failed[:3])
        raise UserError(
            f"{len(failed)} of {total} samples failed their proofs, more than capture.max_quarantined = {limit:g} "
            f"allows: mend the capture ({first}{'; …' if len(failed) > 3 else ''})"
        )


def _layers(sample: Sample) -> list[torch.Tensor]:
    """Four views [t, H]: low, mid, high, last."""
    return [*sample.aux.chunk(3, dim=-1), sample.last]


def _spread(positions: torch.Tensor) -> torch.Tensor:
    """At most POSITIONS of these [n], evenly spread, the first and the last among them."""
    if len(positions) <= POSITIONS:
        return positions
    return positions[torch.linspace(0, len(positions) - 1, POSITIONS).round().long()]


def _coarser(one: torch.dtype, other: torch.dtype) -> torch.dtype:
    return max(one, other, key=lambda dtype: torch.finfo(dtype).eps)


def _gaps(last: torch.Tensor, claimed: torch.Tensor, head: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """How far the logit of `claimed` [n] lies below the best at states `last` [n, H], in tolerances (above 1: no tie).

    The head stays where it is; the few states go there.
    A relative error `noise` [n] of a state's numbers moves a logit w.h by about noise * norm(w * h), elementwise
    product; the logit itself is rounded to eps * abs(w.h). The tolerance is twice the sum of both, for both tokens.
    """
    if not len(last):
        return torch.zeros(0)
    top_ids = best(last, head)
    last, claimed, noise = last.to(head.device), claimed.to(head.device), noise.to(head.device)
    state = last.float()
    top, low = state * head[top_ids].float(), state * head[claimed].float()
    eps = torch.finfo(_coarser(last.dtype, head.dtype)).eps
    moved = noise * (top.norm(dim=-1) + low.norm(dim=-1)) + eps * (top.sum(-1).abs() + low.sum(-1).abs())
    gaps: torch.Tensor = (top.sum(-1) - low.sum(-1)) / (TIE_FACTOR * moved)
    return gaps.cpu()


def _judge(positions: torch.Tensor, claimed: torch.Tensor, gaps: torch.Tensor, what: str) -> tuple[str | None, float]:
    if not len(gaps):
        return None, 0.0
    worst = int(gaps.argmax())
    gap, position = max(0.0, float(gaps[worst])), int(positions[worst])
    reason = f"{what} at position {position} (token {int(claimed[position])} is {gap:.1f} tolerances below the best)"
    return (reason if gap > 1.0 else None), gap
