"""Hypotheses of what is wrong with a draft or with how it is served, each as something that can be replayed.

A *variant* changes one thing: the states that the draft reads, or the draft itself as a server or an export may have
made it. Replayed on the same answers, a variant either is accepted as the server's draft is, or better than the draft
as it is: then it is what happened. Causes are described in docs/diagnose.md.
"""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from eyas.bench.evidence import LAST, Layers
from eyas.draft.config import DEFAULT_THETA, rope_parameters
from eyas.draft.model import DraftModel
from eyas.draft.rotary import frequencies
from eyas.engines import weights
from eyas.engines.layers import default_layers
from eyas.engines.target import TargetInfo
from eyas.errors import UserError

OWN = ""
THETAS = (DEFAULT_THETA, 100000.0, 500000.0, 1000000.0)
CHUNK = 1024
Change = Callable[[DraftModel], DraftModel]


@dataclass(frozen=True)
class Variant:
    """One hypothesis: `cause` is its short name, `label` says it in words, `remedy` mends it.

    `rows`: which answers it is replayed on: OWN, or the name of others.
    """

    cause: str
    label: str
    remedy: str
    layers: Layers
    change: Change = lambda draft: draft
    rows: str = OWN


def all_of(draft: DraftModel, info: TargetInfo, layers: Layers, named: bool, longest: int) -> Iterator[Variant]:
    """Every variant of a draft that reads `layers`; `named`: its config.json names them; rows reach `longest`."""
    yield from of_layers(layers, info.num_layers, named)
    yield from of_rope(draft, info, layers)
    yield from of_vocabulary(draft, info, layers)
    yield from of_head(info, layers)
    yield from of_algorithm(info)
    yield from of_positions(draft, layers, longest)
    if draft.config.norm_before_residual:
        remedy = "serve it with vLLM: SGLang does not know norm_before_residual"
        yield Variant("switches", "norm_before_residual not computed", remedy, layers, _switched_off)


def of_layers(declared: Layers, n: int, named: bool) -> Iterator[Variant]:
    """The states of other layers of a target with `n`: all one off, the default ones, one of them off."""
    late, early = "the ids read as layer outputs", "the ids read as hidden_states, though they are layer outputs"
    tried: list[tuple[str, str, tuple[int, ...]]] = [
        ("convention" if named else "layers", late if named else "one layer late", tuple(x + 1 for x in declared)),
        ("convention" if named else "layers", early if named else "one layer early", tuple(x - 1 for x in declared)),
    ]
    if n > 6:
        tried.append(("layers", "the default layers", default_layers(n)))
    for place in range(3):
        for by in (1, -1):
            moved = tuple(layer + by * (place == i) for i, layer in enumerate(declared))
            tried.append(("layers", "one of them a layer off", moved))
    seen: set[tuple[int, ...]] = {declared}
    for cause, why, layers in tried:
        if layers in seen or layers[0] < 0 or layers[2] >= n or not layers[0] < layers[1] < layers[2]:
            continue
        seen.add(layers)
        remedy = (
            f"draft and server must take the same layers: name hidden_states {list(declared)} as layer outputs "
            f"{[layer - 1 for layer in declared]} in eagle_config for SGLang and as {list(declared)} at the top level "
            "for vLLM, or train on what the server gives"
        )
        low, mid, high = layers
        yield Variant(cause, f"states {list(layers)} in place of {list(declared)}: {why}", remedy, (low, mid, high))


def of_rope(draft: DraftModel, info: TargetInfo, layers: Layers) -> Iterator[Variant]:
    """Other rotary frequencies: the target's, other usual bases, scaling lost or added."""
    own, target = draft.config.rope_parameters, rope_parameters(info.text_config)
    scaling = {name: value for name, value in own.items() if name != "rope_theta"}
    targets_scaling = {name: value for name, value in target.items() if name != "rope_theta"}
    theta = own["rope_theta"]
    differs = "rope_theta" if theta != target["rope_theta"] else "rope_scaling"
    tried: list[tuple[str, str, dict[str, Any]]] = [
        (differs, "the target's rotary embedding", target),
        ("rope_scaling", "without rope scaling", {"rope_type": "default", "rope_theta": theta}),
        ("rope_scaling", "with the target's rope scaling", {**targets_scaling, "rope_theta": theta}),
    ]
    for value in dict.fromkeys((target["rope_theta"], *THETAS)):
        tried.append(("rope_theta", f"rope_theta {value:g}", {**scaling, "rope_theta": value}))
    seen = [(draft.inverse_frequencies.cpu(), draft.rotary_scale)]
    for cause, label, rope in tried:
        try:
            inverse, scale = frequencies(rope, draft.config.head_dim, draft.config.max_position_embeddings)
        except (UserError, KeyError, TypeError, ZeroDivisionError):
            continue  # parameters that belong to the other kind of scaling
        if any(scale == there and torch.allclose(inverse, values, rtol=1e-5) for values, there in seen):
            continue
        seen.append((inverse, scale))
        remedy = (
            f"draft and server must turn positions alike: {_said(own)} is what config.json says, {_said(rope)} what "
            "fits; write the one that the draft was trained with, in rope_theta, rope_scaling and rope_parameters"
        )
        yield Variant(cause, f"{label} ({_said(rope)})", remedy, layers, _rotated(inverse, scale))


def of_vocabulary(draft: DraftModel, info: TargetInfo, layers: Layers) -> Iterator[Variant]:
    """The map from draft ids to target ids lost; or, where the draft has none, one that it may have had."""
    size, whole = draft.config.draft_vocab_size, draft.config.vocab_size
    remedy = "export the draft with its own d2t (target id = draft id + d2t[draft id]) and serve that file"
    if bool(draft.d2t.any()):
        label = "no vocabulary map: draft ids taken as target ids"
        yield Variant("vocabulary_map", label, remedy, layers, _mapped(torch.arange(size)))
    marked = draft.t2d.nonzero().flatten()
    if len(marked) == size < whole and not torch.equal(marked, draft.target_ids):
        yield Variant("vocabulary_map", "the vocabulary that t2d marks", remedy, layers, _mapped(marked))
    if size < whole and not _sane(draft):
        ids = nearest(draft.lm_head.weight, weights.head(info.folder))
        label = "the tokens whose target head rows are nearest to the draft's"
        yield Variant("vocabulary_map", label, remedy, layers, _mapped(ids))


def _sane(draft: DraftModel) -> bool:
    ids = draft.target_ids
    inside = bool(((ids >= 0) & (ids < draft.config.vocab_size)).all())
    return inside and bool(draft.d2t.any()) and len(set(ids.tolist())) == len(ids)


def nearest(rows: torch.Tensor, there: torch.Tensor) -> torch.Tensor:
    """For each of `rows` [D, H] the row of `there` [V, H] in whose direction it points most: int64 [D].

    A draft's head begins as the target's rows of its vocabulary and stays near them.
    """
    wanted = nn.functional.normalize(there.float(), dim=-1)
    unit = nn.functional.normalize(rows.detach().float().cpu(), dim=-1)
    return torch.cat([(part @ wanted.T).argmax(-1) for part in torch.split(unit, CHUNK)])


def of_head(info: TargetInfo, layers: Layers) -> Iterator[Variant]:
    """The head left empty, left random, or replaced by the target's."""
    remedy = "the file that is served must hold lm_head.weight, with tie_word_embeddings false: export it again"
    yield Variant("head", "the head left empty", remedy, layers, _headed(torch.zeros_like))
    yield Variant("head", "the head left random", remedy, layers, _headed(_random_like))
    yield Variant("head", "the target's head in place of its own", remedy, layers, _target_head(info))


def of_algorithm(info: TargetInfo) -> Iterator[Variant]:
    """As SGLang serves an EAGLE-3 draft under EAGLE: the last state past fc, the target's head, no map."""
    remedy = "start the server with --speculative-algorithm EAGLE3: EAGLE skips fc, head and map without an error"
    last = (LAST, LAST, LAST)
    label = "served as EAGLE: the last state, no fc, the target's head, no map"
    yield Variant("eagle", label, remedy, last, _as_eagle(info))
    yield Variant("eagle", "the last state without fc", remedy, last, _of_class(_Unfused))


def of_positions(draft: DraftModel, layers: Layers, longest: int) -> Iterator[Variant]:
    """What may become of positions beyond the draft's own, where rows reach them."""
    limit = draft.config.max_position_embeddings
    remedy = f"serve with a context length of {limit} at most, or train and export a draft with longer positions"
    if longest > limit:
        for label, kind in (("at their limit", _Clamped), ("unusable", _Lost)):
            yield Variant("positions", f"positions from {limit} on {label}", remedy, layers, _of_class(kind))


def with_embeddings(info: TargetInfo) -> Change:
    """The draft beside another target, whose embeddings it shares."""

    def change(draft: DraftModel) -> DraftModel:
        changed = _copied(draft)
        rows = weights.embedding(info.folder).to(draft.embed_tokens.weight)
        changed.embed_tokens = nn.Embedding(rows.shape[0], rows.shape[1], _weight=rows).requires_grad_(False)
        return changed

    return change


def _said(rope: dict[str, Any]) -> str:
    kind, factor = rope.get("rope_type", "default"), rope.get("factor")
    by = f" {factor:g}" if isinstance(factor, int | float) else ""
    return f"theta {rope['rope_theta']:g}" + ("" if kind == "default" else f", {kind}{by}")


def _copied(draft: DraftModel) -> DraftModel:
    """A copy that shares the target's embeddings."""
    return copy.deepcopy(draft, {id(draft.embed_tokens): draft.embed_tokens})


def _rotated(inverse: torch.Tensor, scale: float) -> Change:
    def change(draft: DraftModel) -> DraftModel:
        changed = _copied(draft)
        changed.inverse_frequencies.copy_(inverse)
        changed.rotary_scale = scale
        return changed

    return change


def _mapped(ids: torch.Tensor) -> Change:
    def change(draft: DraftModel) -> DraftModel:
        changed = _copied(draft)
        changed.d2t.copy_(ids.to(changed.d2t.device) - torch.arange(len(ids), device=changed.d2t.device))
        return changed

    return change


def _headed(make: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    def change(draft: DraftModel) -> DraftModel:
        changed = _copied(draft)
        changed.lm_head.weight.data = make(draft.lm_head.weight.detach())
        return changed

    return change


def _random_like(weight: torch.Tensor) -> torch.Tensor:
    return torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)).to(weight)


def _target_head(info: TargetInfo) -> Change:
    def change(draft: DraftModel) -> DraftModel:
        ids = draft.target_ids.clamp(0, draft.config.vocab_size - 1).cpu()
        return _headed(lambda weight: weights.head(info.folder)[ids].to(weight))(draft)

    return change


def _as_eagle(info: TargetInfo) -> Change:
    def change(draft: DraftModel) -> DraftModel:
        size = draft.config.draft_vocab_size
        changed = _mapped(torch.arange(size))(_of_class(_Unfused)(draft))
        changed.lm_head.weight.data = weights.head(info.folder)[:size].to(changed.lm_head.weight)
        return changed

    return change


def _switched_off(draft: DraftModel) -> DraftModel:
    changed = _copied(draft)
    changed.config = replace(changed.config, norm_before_residual=False)
    return changed


def _of_class(kind: type[DraftModel]) -> Change:
    def change(draft: DraftModel) -> DraftModel:
        changed = _copied(draft)
        changed.__class__ = kind
        return changed

    return change


class _Unfused(DraftModel):
    """Takes the highest of its three states as it is."""

    def fuse(self, aux_TC: torch.Tensor) -> torch.Tensor:
        return aux_TC[:, -self.config.hidden_size :]


class _Clamped(DraftModel):
    """Positions beyond the draft's count as its last one."""

    def angles(self, positions: torch.Tensor, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return super().angles(positions.clamp(max=self.config.max_position_embeddings - 1), like)


class _Lost(DraftModel):
    """Positions beyond the draft's give numbers that are none."""

    def angles(self, positions: torch.Tensor, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        outside = (positions >= self.config.max_position_embeddings)[:, None]
        cos, sin = super().angles(positions, like)
        return cos.masked_fill(outside, float("nan")), sin.masked_fill(outside, float("nan"))
