"""What is diagnosed: any draft's folder (`eyas diagnose`), or a run whose draft was not accepted as predicted."""

import os
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from eyas.bench.diagnose import diagnose
from eyas.bench.evidence import Layers, Row, answer_of, answered, of_sample, with_states
from eyas.bench.variants import OWN, Variant, all_of, of_layers, with_embeddings
from eyas.config import Engine
from eyas.corpus.read import counted, read
from eyas.corpus.render import Renderer
from eyas.corpus.step import keep
from eyas.decode.acceptance import Tally
from eyas.decode.replay import load_draft, pooled, spread
from eyas.draft import verify
from eyas.draft.files import read_config
from eyas.engines import target as targets
from eyas.engines.device import pick_device, use_threads
from eyas.engines.inprocess.target import InProcessTarget
from eyas.engines.sglang.layers import IDS, declared_layers
from eyas.engines.target import TargetInfo
from eyas.errors import UserError
from eyas.files import read_json
from eyas.progress import Progress
from eyas.spec import StepSpec
from eyas.store.store import FeatureStore

ROWS = 48
"""Answers that a diagnosis looks at."""
TOKENS = 128
SURE = ("head", "vocabulary_map", "tensors", "numbers", "architecture", "switches", "layers", "origin")
"""Checks of the files that are a cause by themselves; the others are only where the figures bear them out."""


def of_folder(
    draft: Path,
    target: str,
    prompts: str | None,
    served: str | None,
    revision: str | None,
    draft_tokens: int,
    limit: int | None,
    max_new_tokens: int | None,
    progress: Progress,
) -> dict[str, Any]:
    """Diagnose a draft folder on the in-process target's own answers to `prompts` (`builtin` or a file).

    `served`: the accept length on a server, or a file with the *acceptance* there (docs/seams.md); None: unknown.
    `revision`: another version of the target that may be the one it was trained for. Beside what `diagnose` returns,
    `files` are the checks of `eyas verify` that fail. Raises UserError: draft, target, prompts or figures unusable.
    """
    if served is not None:
        read_served(served, draft_tokens, 1)  # what is no figure is refused before minutes are spent
    engine = Engine()
    use_threads(engine)
    device = pick_device(engine)
    config = read_config(draft)
    recorded = (config.get("eyas") or {}).get("heldout") or {}
    info = targets.inspect(target, progress)
    targets.require_in_process(info)
    if revision is not None:
        targets.require_in_process(targets.inspect(revision, progress))
    failed = [check for check in verify.checks(draft, info) if check.passed is False]
    for check in failed:
        if check.name in ("files", "sizes", "target"):
            raise UserError(f"{draft}: {check.detail}: {check.remedy}")
    layers, named = declared_layers(config, info.architecture, info.num_layers), _names_layers(config)
    prompts = prompts or str(recorded.get("prompts", "builtin"))
    tokens = max_new_tokens or min(TOKENS, int(recorded.get("max_new_tokens", TOKENS)))
    asked, refused = read(prompts, "heldout", limit or ROWS)
    render = Renderer(info, recorded.get("chat_template_kwargs", {}))
    context = info.text_config.get("max_position_embeddings")
    counts: Counter[str] = Counter()
    kept = keep(asked, render, context and context - tokens, set(), counts, progress, refused)
    if not kept:
        raise UserError(f"{prompts}: no usable prompt ({dict(counts + counted(refused))})")
    progress.milestone("loading target and draft")
    drafter = load_draft(draft, info, torch.float32, device, anyway=True)
    loaded = InProcessTarget(info, _wanted(layers, info, named), torch.float32, device)
    progress.milestone("answering the prompts")
    rows = {OWN: answered(loaded, [row["ids"] for row in kept], tokens)}
    if not rows[OWN]:
        raise UserError(f"{prompts}: no answer is long enough to draft in; use other prompts or --max-new-tokens")
    variants = list(all_of(drafter, info, layers, named, max(len(row.ids) for row in rows[OWN])))
    if served is not None:
        for label, ids in _otherwise(render, asked).items():
            rows[label] = answered(loaded, ids, tokens)
            remedy = "render prompts with the target's own chat template, as /v1/chat/completions does"
            variants.append(Variant("template", f"prompts sent otherwise: {label}", remedy, layers, rows=label))
    if revision is not None:
        variants.append(_of_revision(revision, rows, layers, [row["ids"] for row in kept], tokens, device, progress))
    figures = None if served is None else read_served(served, draft_tokens, sum(len(r.answer) for r in rows[OWN]))
    possible = [variant for variant in variants if rows[variant.rows]]
    found = diagnose(drafter, layers, possible, rows, figures, draft_tokens, progress)
    sure = [check for check in failed if check.name in SURE]
    if found["cause"] is None and sure:
        first = sure[0]
        found |= {"cause": first.name, "sentence": f"The draft's files are at fault: {first.detail}."}
        found |= {"remedy": first.remedy}
    return {**found, "files": [check.to_json() for check in failed]}


def of_run(spec: StepSpec, decode: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """Diagnose a run's draft from its held-out answers and what the decode step wrote of each.

    Prompts go to a run's server as token ids, and answers that are not the target's own are counted as mismatches, so
    neither the template nor the revision can be at fault here.
    """
    try:
        return _of_run(spec, int(decode["draft_tokens"]), progress)
    except UserError as error:
        return {
            "cause": None,
            "variant": None,
            "sentence": f"It could not be diagnosed: {error}.",
            "remedy": "",
            "trials": [],
        }


def _of_run(spec: StepSpec, draft_tokens: int, progress: Progress) -> dict[str, Any]:
    engine = spec.section(Engine)
    use_threads(engine)
    device = pick_device(engine)
    info = targets.read(spec.inputs["target"])
    config = read_config(spec.inputs["export"])
    store = FeatureStore.open(spec.inputs["capture"] / "heldout", target=info)
    records = [one for path in sorted(spec.inputs["decode"].glob("decoded*.json")) for one in read_json(path)]
    layers, named = store.contract.layers, _names_layers(config)
    same = [one for one in records if answer_of(store.sample(one["row"])) == one["answer"]]
    if not same:
        raise UserError("no answer with the draft is the target's own, so there is nothing to compare")
    chosen = [same[i] for i in spread(len(same), ROWS)]
    rows = [of_sample(store.sample(one["row"]), layers, Tally(**one["tally"])) for one in chosen]
    drafter = load_draft(spec.inputs["export"], info, torch.float32, device)
    variants = list(all_of(drafter, info, layers, named, max(len(row.ids) for row in rows)))
    if runs_here(info):
        progress.milestone("states of other layers")
        loaded = InProcessTarget(info, _wanted(layers, info, named), torch.float32, device)
        rows = [with_states(loaded, row) for row in rows]
    known = rows[0].states.keys()
    possible = [variant for variant in variants if set(variant.layers) <= known]
    figures = pooled([(row.answer, row.served) for row in rows if row.served], draft_tokens)
    return diagnose(drafter, layers, possible, {OWN: rows}, figures, draft_tokens, progress)


def runs_here(info: TargetInfo) -> bool:
    """Whether the target can be run in-process and fits well into memory that is free."""
    try:
        targets.require_in_process(info)
    except UserError:
        return False
    needed = 2 * sum(path.stat().st_size for path in info.folder.glob("*.safetensors"))  # float32 from two bytes
    return needed < os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2


def read_served(text: str, draft_tokens: int, tokens: int) -> dict[str, Any]:
    """The *acceptance* that `--served` gives: an accept length (over answers of `tokens` tokens in all), or a file.

    The file holds an acceptance, or what `eyas bench --json` says. Raises UserError: neither, or figures for another
    number of draft tokens.
    """
    try:
        length = float(text)
    except ValueError:
        return _from_file(Path(text), draft_tokens)
    if not 1 <= length <= draft_tokens + 1:
        raise UserError(
            f"--served {text}: an accept length with {draft_tokens} draft tokens lies within 1 and {draft_tokens + 1}"
        )
    rounds = max(1, round(tokens / length))
    return {"accept_length": length, "rounds": rounds, "accepted": (length - 1) * rounds, "draft_tokens": draft_tokens}


def _from_file(path: Path, draft_tokens: int) -> dict[str, Any]:
    found = read_json(path) if path.is_file() else None
    if isinstance(found, dict) and isinstance(found.get("bench"), list):
        greedy = [row["acceptance"] for row in found["bench"] if row.get("acceptance") and not row.get("temperature")]
        found = greedy[0] if greedy else None
    if not isinstance(found, dict) or not found.get("rounds") or "accepted" not in found:
        raise UserError(f"--served {path}: neither an accept length nor a file with rounds, accepted and by_position")
    if found.get("draft_tokens") != draft_tokens:
        there = found.get("draft_tokens")
        raise UserError(f"--served {path}: measured with {there} draft tokens: set --draft-tokens {there}")
    return found


def _names_layers(config: dict[str, Any]) -> bool:
    return bool(config.get(IDS) or (config.get("eagle_config") or {}).get(IDS))


def _wanted(layers: Layers, info: TargetInfo, named: bool) -> tuple[int, ...]:
    """Every layer that some variant reads."""
    others = {layer for variant in of_layers(layers, info.num_layers, named) for layer in variant.layers}
    return tuple(sorted({*layers, *others}))


def _otherwise(render: Renderer, asked: list[Any]) -> dict[str, list[list[int]]]:
    """The prompts as a client may send them by mistake, by mistake."""
    found: dict[str, list[list[int]]] = {}
    for row in (row for row in asked if row.ids is None):
        for label, ids in render.otherwise(row).items():
            found.setdefault(label, []).append(ids)
    return found


def _of_revision(
    revision: str,
    rows: dict[str, list[Row]],
    layers: Layers,
    prompts: list[list[int]],
    tokens: int,
    device: torch.device,
    progress: Progress,
) -> Variant:
    other = targets.inspect(revision, progress)
    targets.require_in_process(other)
    loaded = InProcessTarget(other, layers, torch.float32, device)
    rows[revision] = answered(loaded, prompts, tokens)
    remedy = f"serve {revision}, or train a draft on the target that is served"
    return Variant("revision", f"the target {revision}", remedy, layers, with_embeddings(other), revision)
