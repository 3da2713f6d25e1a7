"""The decode step of an SGLang run: held-out prompts answered by the server that has the exported draft.

Three facts come out, in the very form of the in-process decode step: the accept length as served beside the one that
replay predicts for the same prompts; whether every answer equals the target's own; how much faster it is than the
baseline, at every concurrency, temperature and workload of the run file.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from eyas.bench import baseline
from eyas.bench.baseline import Figure
from eyas.bench.counts import tally_of
from eyas.bench.measure import Block
from eyas.bench.workloads import HELDOUT
from eyas.capture import proofs
from eyas.config import Answers, Bench, Decode, Engine, Server, Target
from eyas.decode.acceptance import Tally
from eyas.decode.replay import answer_length, load_draft, pooled, prompt_ids, replay, spread
from eyas.engines import target as targets
from eyas.engines import weights
from eyas.engines.device import pick_device, use_threads
from eyas.engines.sglang import client, info
from eyas.engines.sglang.answers import answer_of, body
from eyas.engines.sglang.command import Draft, shell, tuned
from eyas.engines.sglang.http import Connection
from eyas.engines.sglang.pool import fan_out
from eyas.engines.sglang.server import endpoints
from eyas.engines.target import TargetInfo
from eyas.files import read_json, write_json
from eyas.progress import Progress, Silent
from eyas.spec import StepSpec
from eyas.store.store import FeatureStore

ROWS = "decoded.json"


def run(spec: StepSpec, out: Path, progress: Progress) -> dict[str, Any]:
    """Step entry; leases `drafted`. Raises UserError: a server that serves without speculation, or hides its counts."""
    config, bench = spec.section(Decode), spec.section(Bench)
    use_threads(spec.section(Engine))
    target = targets.read(spec.inputs["target"])
    store = FeatureStore.open(spec.inputs["capture"] / "heldout", target=target)
    url = endpoints(spec.services["drafted"])[0].url
    rows = spread(len(store), config.prompts)
    with client.leased():
        about = info.read(url)
        drafted = baseline.take(url, spec, store, target, config.draft_tokens, out, progress)
        if not (out / ROWS).exists():
            progress.total(len(rows), "prompts")
            progress.milestone("answering with the draft")
            write_json(out / ROWS, answer_rows(url, spec, store, rows, target, progress))
    records = read_json(out / ROWS)
    plain = baseline.read_blocks(spec.inputs["baseline"])
    figures = baseline.rows(plain, drafted, config)
    timing = compare(plain, drafted)
    progress.milestone("replaying the same prompts")
    draft = load_draft(spec.inputs["export"], target, torch.float32, pick_device(spec.section(Engine)))
    predicted = {row: tally for row, _, tally in replay(draft, store, config.draft_tokens, rows, Silent())}
    dtype = store.contract.flags["computed_in"]
    different = [record for record in records if record["differs"] is not None]
    ties = near_ties(store, different, target) if dtype != "float32" else []
    wrong = {record["row"] for record in different if record["row"] not in ties}
    timed_wrong = sum(not row["equal"] for row in timing) if dtype == "float32" else 0
    first = next((row for row in figures if (row["workload"], row["concurrency"]) == (HELDOUT, 1)), None)
    return {
        **pooled([(r["answer"], Tally(**r["tally"])) for r in records], config.draft_tokens),
        "predicted": pooled([(r["answer"], predicted[r["row"]]) for r in records], config.draft_tokens),
        "lossless": not wrong and not timed_wrong,
        "mismatches": len(wrong) or timed_wrong,
        "near_ties": len(ties),
        "different_rows": sorted({record["row"] for record in different} | wrong),
        "inexact_rows": sum(not record["exact"] for record in records),
        "prompts": len(rows),
        "dtype": dtype,
        "engine": f"SGLang {about.version}",
        "speedup": first["ratio"] if first else {"ratio": None, "low": None, "high": None},
        "bench": figures,
        "launch": launch(spec, target),
        "timed_tokens": bench.max_new_tokens,
        "timing": timing,
        "versions": {"sglang": about.version},
    }


def launch(spec: StepSpec, target: TargetInfo) -> str:
    """The shell command that serves the target with the exported draft as it was measured."""
    draft = Draft(spec.inputs["export"], spec.section(Decode).draft_tokens)
    return shell(tuned(spec.section(Server), spec.inputs), target.folder, spec.section(Target).dtype, draft)


def answer_rows(
    url: str, spec: StepSpec, store: FeatureStore, rows: Sequence[int], target: TargetInfo, progress: Progress
) -> list[dict[str, Any]]:
    """Answer store rows; each with its answer, its tally, and where it differs from the target's own (None: nowhere).

    The replies are streamed: only so is it known what the last verify step of an answer did (`bench/counts.py`).
    """
    config, answers = spec.section(Decode), spec.section(Answers)
    longest = answers.heldout_max_new_tokens or answers.max_new_tokens
    eos = target.eos_token_ids

    def work(connection: Connection, server: int, row: int) -> dict[str, Any]:
        sample = store.sample(row)
        own = sample.ids[len(sample.ids) - answer_length(sample) :].tolist()
        events = client.events(connection, body(prompt_ids(sample), longest, eos))
        ids, _ = answer_of(url, events[-1], eos, target.vocab_size)
        tally, exact = tally_of(url, events, len(ids), config.draft_tokens)
        progress.advance(1)
        return {"row": row, "answer": ids, "differs": difference(ids, own), "exact": exact, "tally": asdict(tally)}

    found = list(fan_out([url], rows, work, concurrency=min(spec.section(Server).concurrency, config.batch)))
    return sorted(found, key=lambda record: int(record["row"]))


def difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """The first place at which two answers differ; None: they are equal."""
    if list(one) == list(other):
        return None
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def compare(plain: Mapping[Figure, list[Block]], drafted: Mapping[Figure, list[Block]]) -> list[dict[str, Any]]:
    """Greedy answers to the same held-out prompts one at a time, without and with the draft: seconds and equality, in
    the form of the in-process decode step."""
    figure = (HELDOUT, 1, 0.0)
    if figure not in plain or figure not in drafted:
        return []
    pairs = zip(plain[figure][0].requests, drafted[figure][0].requests, strict=True)
    return [
        {
            "prompt": one.key,
            "tokens": len(one.ids),
            "draft_tokens": len(other.ids),
            "equal": one.ids == other.ids,
            "plain": one.seconds,
            "draft": other.seconds,
        }
        for one, other in pairs
    ]


def near_ties(store: FeatureStore, different: Sequence[dict[str, Any]], target: TargetInfo) -> set[int]:
    """Rows whose first differing token is, by the captured states, as good a choice as the target's own was.

    Below float32 a verify step rounds otherwise than a single step does, and a choice between two tokens whose logits
    are a tie may fall either way; whatever follows differs then.
    """
    if not different:
        return set()
    head = weights.head(target.folder)
    found = set()
    for record in different:
        sample = store.sample(record["row"])
        place = len(sample.ids) - answer_length(sample) + record["differs"]
        if place >= len(sample.ids) or record["differs"] >= len(record["answer"]):
            continue
        instead = torch.tensor([record["answer"][record["differs"]]])
        if bool(proofs.tied(sample.last[place - 1 : place], instead, head.to(sample.last.dtype)).all()):
            found.add(record["row"])
    return found
