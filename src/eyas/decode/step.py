"""The decode step: held-out prompts answered with the exported draft, for real, and timed against plain decoding.

Facts that come out: the accept length as decoded beside the one that replay predicts for the same prompts; whether
every token equals plain decoding's (the held-out answers of the answers step); how much faster it is, one request at a
time, with and without the draft taking turns; and the accept length at the temperatures of `bench.temperatures`.
"""

import math
import statistics
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from eyas.config import Answers, Bench, Decode, Engine
from eyas.decode.acceptance import Tally
from eyas.decode.chain import decode
from eyas.decode.replay import answer_length, load_draft, pooled, replay, spread
from eyas.decode.sample import Judge, Sampled
from eyas.draft.model import DraftModel
from eyas.engines import target as targets
from eyas.engines.device import pick_device, pick_dtype, use_threads
from eyas.engines.inprocess.generate import answer
from eyas.engines.inprocess.target import InProcessTarget
from eyas.files import read_json, write_json
from eyas.progress import Progress, Silent
from eyas.spec import StepSpec
from eyas.store.store import FeatureStore


def run(spec: StepSpec, out: Path, progress: Progress) -> dict[str, Any]:
    """Step entry. Finished batches and timings are kept, one JSON file each."""
    engine, config, answers = spec.section(Engine), spec.section(Decode), spec.section(Answers)
    use_threads(engine)
    progress.milestone("loading target and draft")
    info = targets.read(spec.inputs["target"])
    store = FeatureStore.open(spec.inputs["capture"] / "heldout", target=info)
    device = pick_device(engine)
    dtype = pick_dtype(answers.heldout_dtype, device)
    target = InProcessTarget(info, store.contract.layers, dtype, device)
    draft = load_draft(spec.inputs["export"], info, dtype, device)
    longest = answers.heldout_max_new_tokens or answers.max_new_tokens

    rows = spread(len(store), config.prompts)
    timed = spread(len(store), config.timing_prompts)
    heats = [heat for heat in spec.section(Bench).temperatures if heat > 0]
    progress.total((1 + len(heats)) * len(rows) + len(timed), "prompts")

    def decoded(name: str, heat: float) -> list[dict[str, Any]]:
        records: list[dict[str, Any]] = []
        for number, batch in enumerate(rows[i : i + config.batch] for i in range(0, len(rows), config.batch)):
            path = out / f"{name}-{number:05}.json"
            if not path.is_file():
                judge = sampled(target, heat, f"{spec.seed} {heat} {number}") if heat else None
                write_json(path, decode_rows(target, draft, store, batch, longest, config.draft_tokens, judge))
            records += read_json(path)
            progress.advance(len(batch))
        return records

    progress.milestone("decoding with the draft")
    records = decoded("decoded", 0.0)
    warm = []
    for heat in heats:
        progress.milestone(f"decoding at temperature {heat:g}")
        walks = [(r["answer"], Tally(**r["tally"])) for r in decoded(f"sampled-{heat:g}", heat)]
        warm.append({"temperature": heat, **pooled(walks, config.draft_tokens)})
    progress.milestone("timing one request at a time")
    timing = []
    for turn, row in enumerate(timed):
        path = out / f"timed-{turn:05}.json"
        if not path.is_file():
            write_json(
                path, time_row(target, draft, store, row, min(longest, config.timing_tokens), config.draft_tokens, turn)
            )
        timing.append(read_json(path))
        progress.advance(1)

    predicted = {row: tally for row, _, tally in replay(draft, store, config.draft_tokens, rows, Silent())}
    kept = [(r["answer"], predicted[r["row"]]) for r in records]
    different = sorted({r["row"] for r in records if not r["equal"]} | {t["prompt"] for t in timing if not t["equal"]})
    return {
        **pooled([(r["answer"], Tally(**r["tally"])) for r in records], config.draft_tokens),
        "predicted": pooled(kept, config.draft_tokens),
        "lossless": not different,
        "mismatches": len(different),
        "different_rows": different,
        "prompts": len(rows),
        "dtype": str(dtype).removeprefix("torch."),
        "speedup": speedup(timing),
        "timed_tokens": config.timing_tokens,
        "timing": timing,
        "sampled": warm,
    }


def sampled(target: InProcessTarget, heat: float, seed: str) -> Sampled:
    """Draws at a temperature; what it draws depends on `seed` alone."""
    generator = torch.Generator(target.device).manual_seed(zlib.crc32(seed.encode()))
    return Sampled(target, heat, generator)


def decode_rows(
    target: InProcessTarget,
    draft: DraftModel,
    store: FeatureStore,
    rows: Sequence[int],
    longest: int,
    draft_tokens: int,
    judge: Judge | None = None,
) -> list[dict[str, Any]]:
    """Decode store rows together; each with its answer, its tally and whether it equals plain greedy decoding's."""
    samples = [store.sample(row) for row in rows]
    prompts = [s.ids[: len(s.ids) - answer_length(s)].tolist() for s in samples]
    decoded = decode(target, draft, prompts, longest, draft_tokens, judge=judge)
    return [
        {
            "row": row,
            "answer": d.ids[d.prompt :],
            "equal": d.ids == sample.ids.tolist(),
            "tally": {
                "draft_tokens": draft_tokens,
                "rounds": d.tally.rounds,
                "reached": d.tally.reached,
                "accepted": d.tally.accepted,
                "rows": 1,
            },
        }
        for row, sample, d in zip(rows, samples, decoded, strict=True)
    ]


def time_row(
    target: InProcessTarget, draft: DraftModel, store: FeatureStore, row: int, tokens: int, draft_tokens: int, turn: int
) -> dict[str, Any]:
    """Seconds for one prompt with and without the draft; which goes first alternates with `turn`."""
    sample = store.sample(row)
    prompt = [sample.ids[: len(sample.ids) - answer_length(sample)].tolist()]
    seconds, said = {}, {}
    if turn == 0:  # the very first passes pay for memory and kernels that are set up once
        answer(target, prompt, 4)
        decode(target, draft, prompt, 4, draft_tokens)
    for kind in ("plain", "draft") if turn % 2 == 0 else ("draft", "plain"):
        began = time.perf_counter()
        if kind == "plain":
            said[kind] = answer(target, prompt, tokens)[0].ids
        else:
            said[kind] = decode(target, draft, prompt, tokens, draft_tokens)[0].ids
        seconds[kind] = time.perf_counter() - began
    return {
        "prompt": row,
        "tokens": len(said["plain"]) - len(prompt[0]),
        "equal": said["plain"] == said["draft"],
        **seconds,
    }


def speedup(timing: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    """Plain over draft seconds: the geometric mean over prompts, with its 95 % t-interval; no interval below three."""
    logs = [math.log(t["plain"] / t["draft"]) for t in timing]
    mean = statistics.fmean(logs)
    if len(logs) < 3:
        return {"ratio": math.exp(mean), "low": None, "high": None}
    reach = student(len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
    return {"ratio": math.exp(mean), "low": math.exp(mean - reach), "high": math.exp(mean + reach)}


def student(freedom: int) -> float:
    """The 97.5 % quantile of Student's t, by Fisher's expansion around the normal one; within 3 % from two degrees."""
    z = statistics.NormalDist().inv_cdf(0.975)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / freedom ** (i + 1) for i, term in enumerate(terms))
