"""`eyas verify`: will engines make of a draft's files what was trained? Every check reads files; no model runs.

Most of these faults are silent: an engine skips unknown tensors, leaves missing ones random, and takes other layers or
rotary frequencies than those that the draft was trained with. Names of checks are the causes of docs/diagnose.md.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from eyas.draft import checkpoint
from eyas.draft.config import ARCHITECTURE, DraftConfig, read_switches, rope_parameters
from eyas.draft.files import read_config, read_tensors
from eyas.engines import target as targets
from eyas.engines.sglang.checks import Check
from eyas.engines.sglang.layers import IDS, declared_layers
from eyas.engines.sglang.loader import Loader
from eyas.engines.target import TargetInfo
from eyas.errors import UserError
from eyas.progress import Progress

VLLM = ("Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel")
"""Architectures that vLLM knows and SGLang does not."""
Said = tuple[bool | None, str, str]
"""Passed, detail and remedy of a check. Passed is None where it cannot be said, or is true of one engine only."""


@dataclass(frozen=True)
class _Files:
    """What the checks look at; `shape` None where config.json lacks what a draft needs."""

    config: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    shape: DraftConfig | None
    info: TargetInfo

    @property
    def layer(self) -> dict[str, Any]:
        """The part of config.json that describes the layer."""
        found: dict[str, Any] = self.config.get("transformer_layer_config") or self.config
        return found


def verify(draft: Path, target: str, python: str | None, progress: Progress) -> dict[str, Any]:
    """`{"checks": [{name, passed, detail, remedy}], "seconds"}` of a draft folder against a target.

    `python`: an interpreter whose SGLang is asked too. Raises UserError: the target cannot be looked at.
    """
    begun = time.monotonic()
    info = targets.inspect(target, progress)
    loader = Loader(draft, python) if python else None
    progress.milestone(f"reading {draft}")
    found = checks(draft, info)
    if loader:
        progress.milestone("asking SGLang's own loader")
        found.append(loader.check())
    return {"checks": [check.to_json() for check in found], "seconds": time.monotonic() - begun}


def checks(folder: Path, info: TargetInfo) -> list[Check]:
    """All checks of a draft folder; only the first where its files cannot be read."""
    try:
        config, tensors = read_config(folder), read_tensors(folder)
    except UserError as error:
        return [Check("files", False, str(error), "export or download the draft again")]
    shape: DraftConfig | None
    try:
        shape = DraftConfig.from_hf({**config, "architectures": [ARCHITECTURE]})
    except UserError as error:
        shape, problem = None, str(error)
    files = _Files(config, tensors, shape, info)
    found = [Check("files", True, f"{len(tensors)} tensors", "")]
    if shape is None:
        found.append(Check("sizes", False, problem, "take config.json from where the draft comes from"))
    for name, look in CHECKS.items():
        found += [Check(name, *said) for said in look(files)]
    return found


def _architecture(files: _Files) -> Iterator[Said]:
    names, layers = files.config.get("architectures") or [], files.layer.get("num_hidden_layers", 1)
    remedy = f'write "architectures": ["{ARCHITECTURE}"]: SGLang and vLLM both know it'
    if names == [ARCHITECTURE]:
        yield True, f"{ARCHITECTURE}, which SGLang and vLLM know", ""
    elif names and names[0] in VLLM:
        yield None, f"{names[0]} is known to vLLM alone", remedy
    else:
        yield False, f"{names} is no EAGLE-3 class that an engine knows", remedy
    if layers != 1:
        yield False, f"{layers} layers, where an EAGLE-3 draft has one", "take an EAGLE-3 draft"


def _target(files: _Files) -> Iterator[Said]:
    if files.shape is None:
        return
    for what, own, needed in (
        ("hidden size", files.config.get("target_hidden_size", files.shape.hidden_size), files.info.hidden_size),
        ("hidden size of the layer", files.shape.hidden_size, files.info.hidden_size),
        ("vocabulary", files.shape.vocab_size, files.info.vocab_size),
    ):
        if own != needed:
            yield False, f"{what} {own}, the target has {needed}", "name the target that the draft was made for"
            return
    yield True, f"width {files.shape.hidden_size}, {files.shape.vocab_size} tokens, as the target", ""


def _tensors(files: _Files) -> Iterator[Said]:
    if files.shape is None:
        return
    wanted = {
        name: size
        for name, size in checkpoint.shapes(files.shape).items()
        if name not in ("lm_head.weight", "d2t", "t2d")
    }
    there, remedy = files.tensors, "export the draft again; a name that an engine does not know is skipped in silence"
    missing = sorted(wanted.keys() - there.keys())
    unknown = sorted(there.keys() - checkpoint.shapes(files.shape).keys() - {"embed_tokens.weight"})
    wrong = [
        f"{n} {list(there[n].shape)} for {list(s)}" for n, s in wanted.items() if n in there and there[n].shape != s
    ]
    for what, which in (("missing", missing), ("unknown", unknown), ("of another shape", wrong)):
        if which:
            more = f" and {len(which) - 4} more" if len(which) > 4 else ""
            yield False, f"{what}: {', '.join(which[:4])}{more}", remedy
    if not (missing or unknown or wrong):
        yield True, "names and shapes as the engines' loaders want them", ""


def _head(files: _Files) -> Iterator[Said]:
    if files.shape is None:
        return
    head, rows = files.tensors.get("lm_head.weight"), files.shape.draft_vocab_size
    remedy = "export the draft again, with lm_head.weight and tie_word_embeddings false"
    if head is None:
        yield False, "lm_head.weight is missing: SGLang leaves it uninitialised, in silence", remedy
    elif head.shape != (rows, files.shape.hidden_size):
        stated = f"draft_vocab_size {rows} times {files.shape.hidden_size}"
        yield False, f"lm_head.weight is {list(head.shape)}, config.json says {stated}", remedy
    elif files.layer.get("tie_word_embeddings") and files.layer is files.config:
        yield False, "tie_word_embeddings is true: an engine takes the embeddings in place of the head", remedy
    elif not bool(head.any()):
        yield False, "lm_head.weight is all zeros", remedy
    else:
        yield True, f"its own, {rows} rows", ""


def _vocabulary_map(files: _Files) -> Iterator[Said]:
    if files.shape is None:
        return
    size, whole = files.shape.draft_vocab_size, files.shape.vocab_size
    d2t, t2d = files.tensors.get("d2t"), files.tensors.get("t2d")
    remedy = "export the draft again with its own map: target id = draft id + d2t[draft id]"
    if d2t is None:
        said = f"there is no d2t, and the draft knows {size} of {whole} tokens"
        yield (True, f"none, and none needed for {whole} tokens", "") if size == whole else (False, said, remedy)
        return
    if d2t.dtype.is_floating_point or d2t.shape != (size,):
        yield False, f"d2t is {d2t.dtype} {list(d2t.shape)}, not {size} whole numbers", remedy
        return
    ids = d2t.long() + torch.arange(size)
    if bool(((ids < 0) | (ids >= whole)).any()):
        looks = "; it looks like ids instead of offsets" if bool(((d2t >= 0) & (d2t < whole)).all()) else ""
        yield False, f"d2t leads outside the target's {whole} tokens{looks}", remedy
    elif len(ids.unique()) < size:
        yield False, f"d2t names {size - len(ids.unique())} tokens twice", remedy
    elif t2d is not None and not _marks(t2d, ids, whole):
        yield False, "t2d marks other tokens than d2t leads to", remedy
    elif size < whole and not bool(d2t.any()):
        said = f"d2t is all zeros: the draft would know the first {size} of {whole} tokens"
        yield False, said + ", which are rarely the most frequent ones", remedy
    elif bool((ids[1:] < ids[:-1]).any()):
        yield False, "d2t is not in ascending order, which some engines require", remedy
    else:
        yield True, f"{size} of {whole} tokens", ""


def _marks(t2d: torch.Tensor, ids: torch.Tensor, whole: int) -> bool:
    return t2d.shape == (whole,) and int(t2d.bool().sum()) == len(ids) and bool(t2d.bool()[ids].all())


def _layers(files: _Files) -> Iterator[Said]:
    info, config = files.info, files.config
    eagle = config.get("eagle_config") or {}
    top, nested = config.get(IDS), eagle.get(IDS)
    remedy = f"export with the layers that it was trained on: {IDS} at the top level as hidden_states (vLLM), "
    remedy += "in eagle_config as SGLang's class reads them; neither for the default layers"
    try:
        layers = declared_layers(config, info.architecture, info.num_layers)
    except UserError as error:
        yield False, str(error), remedy
        return
    if eagle.get("use_aux_hidden_state") is False:
        yield False, "eagle_config says use_aux_hidden_state false, so no layers are taken", remedy
    trained = ((config.get("eyas") or {}).get("contract") or {}).get("layers")
    default = declared_layers({}, info.architecture, info.num_layers) if info.num_layers > 6 else None
    if trained and list(layers) != list(trained):
        yield False, f"trained on hidden_states {list(trained)}, engines would take {list(layers)}", remedy
    elif nested and top and list(layers) != list(top):
        yield False, f"SGLang takes hidden_states {list(layers)}, vLLM {list(top)}", remedy
    elif top and not nested and layers != default:
        yield None, f"hidden_states {list(top)} for vLLM; SGLang does not read them and takes {default}", remedy
    elif nested and not top and layers != default:
        yield None, f"hidden_states {list(layers)} for SGLang; vLLM may read the ids otherwise", remedy
    else:
        yield True, f"hidden_states {list(layers)}{'' if top or nested else ', the default'}", ""


def _rope(files: _Files) -> Iterator[Said]:
    own, target = rope_parameters(files.layer), rope_parameters(files.info.text_config)
    remedy = f"where the draft was trained with the target's, write rope_theta {target['rope_theta']:g}"
    remedy += ", rope_scaling and rope_parameters as the target's config.json has them"
    if float(own["rope_theta"]) != float(target["rope_theta"]):
        yield False, f"theta {own['rope_theta']:g}, the target's {target['rope_theta']:g}", remedy
    elif scaling(own) != scaling(target):
        yield False, f"scaling {scaling(own) or 'none'}, the target's {scaling(target) or 'none'}", remedy
    else:
        kind = own["rope_type"]
        yield True, f"theta {own['rope_theta']:g}, {'no scaling' if kind == 'default' else kind}, as the target", ""
    old = files.layer.get("rope_theta")
    if old is not None and float(old) != float(own["rope_theta"]):
        yield False, f"rope_theta {old:g} and rope_parameters {own['rope_theta']:g} contradict each other", remedy


def scaling(rope: dict[str, Any]) -> dict[str, Any]:
    """The part of rotary parameters that is not the usual form; empty for that."""
    kept = {name: value for name, value in rope.items() if name not in ("rope_theta", "type")}
    return {} if kept.get("rope_type", "default") == "default" else kept


def _positions(files: _Files) -> Iterator[Said]:
    own, target = files.layer.get("max_position_embeddings"), files.info.text_config.get("max_position_embeddings")
    remedy = f"serve with a context length of {own} at most, or train and export a draft with longer positions"
    if not own or not target:
        yield None, f"the draft states {own}, the target {target}", ""
    elif own < target:
        yield False, f"{own} positions, the target has {target}: longer contexts are drafted blindly", remedy
    else:
        yield True, f"{own}, the target has {target}", ""


def _dtype(files: _Files) -> Iterator[Said]:
    kinds = sorted({str(t.dtype).removeprefix("torch.") for t in files.tensors.values() if t.is_floating_point()})
    stated = files.layer.get("dtype") or files.layer.get("torch_dtype") or files.config.get("dtype")
    wanted = files.info.text_config.get("dtype") or files.info.text_config.get("torch_dtype")
    if len(kinds) != 1:
        yield False, f"tensors of {', '.join(kinds) or 'no floating type'}", "export the draft again, in one dtype"
    elif stated and stated != kinds[0]:
        yield False, f"tensors are {kinds[0]}, config.json says {stated}", "export the draft again"
    else:
        yield True, f"{kinds[0]}{'' if wanted in (None, kinds[0]) else f', the target {wanted}'}", ""


def _finite(files: _Files) -> Iterator[Said]:
    spoiled = [n for n, t in sorted(files.tensors.items()) if t.is_floating_point() and not bool(t.isfinite().all())]
    if spoiled:
        yield False, f"{', '.join(spoiled[:4])} holds numbers that are not finite", "train or download it again"
    else:
        yield True, "all numbers are finite", ""


def _switches(files: _Files) -> Iterator[Said]:
    on = [name for name, value in read_switches(files.config).items() if value]
    only_nested = [name for name in on if not files.config.get(name) and "speculators_model_type" not in files.config]
    if only_nested:
        said = f"{', '.join(only_nested)} in eagle_config only, where SGLang and vLLM do not look"
        yield False, said, f'write "{only_nested[0]}": true at the top level of config.json too'
    elif "norm_before_residual" in on:
        yield None, "norm_before_residual: vLLM computes it, SGLang does not know it", ""
    else:
        yield True, ", ".join(on) or "plain EAGLE-3", ""


def _origin(files: _Files) -> Iterator[Said]:
    contract = (files.config.get("eyas") or {}).get("contract") or {}
    named = {"model_digest": "weights", "tokenizer_digest": "tokenizer", "template_digest": "chat template"}
    differ = [what for name, what in named.items() if contract.get(name, "") not in ("", getattr(files.info, name))]
    if differ:
        said = f"trained on another {' and another '.join(differ)} than this target's"
        yield False, said, "serve the revision that the draft was trained on, or train it again on this one"
    elif contract:
        yield True, "trained on this very target", ""
    else:
        yield None, "the draft does not say what it was trained on", ""


CHECKS: dict[str, Callable[[_Files], Iterator[Said]]] = {
    "architecture": _architecture,
    "target": _target,
    "tensors": _tensors,
    "head": _head,
    "vocabulary_map": _vocabulary_map,
    "layers": _layers,
    "rope": _rope,
    "positions": _positions,
    "switches": _switches,
    "dtype": _dtype,
    "numbers": _finite,
    "origin": _origin,
}
