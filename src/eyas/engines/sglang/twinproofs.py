"""What is proven on a twin: each captured layer is the one it is called; a draft does not change answers."""

import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from eyas.capture.proofs import RECAPTURE_TOLERANCE
from eyas.engines.sglang import twinmodel
from eyas.engines.sglang.checks import Check
from eyas.engines.sglang.twinmodel import Twin
from eyas.store.shard import Sample

EXACT = 1e-5
"""Relative error of a float32 capture, on a CPU, against transformers; seen are 5e-6 and less."""
GPU_FLOAT32 = 5e-3
"""On a GPU kernels multiply float32 in TF32."""
APART = 4.0
"""A neighbouring layer has to differ by this many times the tolerance."""
TIE = {True: 1e-3, False: 0.1}
"""Logits this close, in standard deviations of all of them, may change places: in float32, and in bfloat16."""


@dataclass
class Proven:
    """What was found on a twin."""

    checks: list[Check] = field(default_factory=list)
    layers: dict[str, float] = field(default_factory=dict)
    """Relative error against transformers of each captured layer, by its name, as `hidden_states[2]`."""
    exact: bool = False
    """All of them within 1e-5, in float32."""


def identity(
    reference: Any, samples: dict[str, Sample], layers: tuple[int, int, int], device: str, found: Proven
) -> Iterator[Check]:
    """Compare every captured layer, and the last state, with transformers' and with that layer's neighbours'.

    Every sample has to agree. With experts the median sample has to: at a tie of two experts rounding decides, and
    moves those rows a little; but no row may be as far away as another layer's, or another token's, would be.
    """
    errors: dict[str, list[float]] = {}
    rows: dict[str, float] = {}
    apart: dict[str, list[float]] = {}
    tolerance = EXACT
    for sample in samples.values():
        states, _ = twinmodel.states(reference, sample.ids)
        if sample.aux.dtype != torch.float32:
            tolerance = RECAPTURE_TOLERANCE[torch.bfloat16]
        elif "cpu" not in device:
            tolerance = GPU_FLOAT32
        captured = [*sample.aux.chunk(3, -1), sample.last]
        for layer, state in zip([*layers, len(states) - 1], captured, strict=True):
            name = f"hidden_states[{layer}]" if layer < len(states) - 1 else "last, normed"
            errors.setdefault(name, []).append(relative(state, states[layer]))
            rows[name] = max(rows.get(name, 0.0), float(by_row(state, states[layer]).max()))
            near = [relative(states[other], states[layer]) for other in (layer - 1, layer + 1) if other < len(states)]
            apart.setdefault(name, []).append(min(near))
    for name, values in errors.items():
        neighbour = min(apart[name])
        error = statistics.median(values) if experts(reference.config) else max(values)
        found.layers[name] = error
        detail = (
            f"relative error {error:.1e} of transformers', its neighbours' {neighbour:.2g}, worst row {rows[name]:.1e}"
        )
        if neighbour < APART * tolerance:
            yield Check(f"{name} is itself", None, f"proves nothing, neighbours are too much alike: {detail}")
        else:
            remedy = "this build of SGLang takes other states than it says: report its version and the model class"
            passed = error <= tolerance and rows[name] < neighbour
            yield Check(f"{name} is itself", passed, detail, "" if passed else remedy)
    found.exact = bool(found.layers) and max(found.layers.values()) <= EXACT


def experts(config: Any) -> bool:
    """Whether a model's tokens choose between experts."""
    return any(getattr(config, key, None) for key in ("n_routed_experts", "num_experts", "num_local_experts"))


def relative(state: torch.Tensor, reference: torch.Tensor) -> float:
    """Root mean square of the rows' relative errors, [T, H] each."""
    return float(by_row(state, reference).square().mean().sqrt())


def by_row(state: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Each row's relative error, [T]."""
    return (state.float() - reference).norm(dim=-1) / reference.norm(dim=-1)


def judge(
    name: str, twin: Twin, prompts: list[list[int]], plain: list[list[int]], drafted: list[list[int]], exact: bool
) -> Check:
    """Answers with a draft equal those without. A first difference may be a tie of two logits: hardly ever in float32
    (`exact`), easily in bfloat16.
    """
    remedy = "speculation changes answers in this build of SGLang for this class: do not serve a draft with it"
    ties = 0
    for ids, one, other in zip(prompts, plain, drafted, strict=True):
        if one == other:
            continue
        if len(one) != len(other):
            return Check(name, False, f"answers of {len(one)} tokens without and {len(other)} with a draft", remedy)
        at = next(i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)
        detail = f"token {at} of an answer is {other[at]} with a draft and {one[at]} without"
        if twin.reference is None:
            return Check(name, False if exact else None, detail, remedy if exact else "")
        logits = twinmodel.states(twin.reference, torch.tensor([*ids, *one[:at]]))[1][-1]
        gap = float((logits[one[at]] - logits[other[at]]).abs() / logits.std())
        if gap > TIE[exact]:
            return Check(name, False, detail, remedy)
        ties += 1
    tied = f", {ties} of them up to a tie" if ties else ""
    return Check(name, True, f"{len(plain)} answers, {sum(map(len, plain))} tokens{tied}")
