"""The sweep step: how many tokens to draft, at each concurrency, and above which concurrency not to draft at all.

Replay tells the accept length of any number of draft tokens, the decode step what a round costs with one of them. From
both the speed-up of each is predicted; the best few are measured, a server load each, and every measured one makes the
next prediction better.
"""

from pathlib import Path
from typing import Any

import torch

from eyas.bench import baseline, cost
from eyas.bench.baseline import DRAFTED, Figure
from eyas.bench.cost import Costs
from eyas.bench.measure import Block
from eyas.bench.workloads import HELDOUT
from eyas.config import Bench, Decode, Engine, Server, Target
from eyas.decode.replay import acceptance, load_draft
from eyas.engines import target as targets
from eyas.engines.device import pick_device, use_threads
from eyas.engines.sglang.command import tuned
from eyas.engines.sglang.http import ServerDied
from eyas.engines.sglang.server import Draft, started
from eyas.errors import UserError
from eyas.files import read_json, write_json
from eyas.progress import Progress
from eyas.spec import StepSpec
from eyas.store.store import FeatureStore

Measured = dict[int, dict[int, dict[str, Any]]]
"""Bench rows by draft tokens and concurrency."""


def run(spec: StepSpec, out: Path, progress: Progress) -> dict[str, Any]:
    """Step entry; starts servers itself. Each measured length is a file, so that an interrupted sweep goes on."""
    bench, decode = spec.section(Bench), spec.section(Decode)
    use_threads(spec.section(Engine))
    lengths = sorted({*bench.sweep, decode.draft_tokens})
    accepts = {k: _accept_length(spec, k, progress) for k in lengths}
    plain = baseline.read_blocks(spec.inputs["baseline"])
    drafted = baseline.read_blocks(spec.inputs["decode"], DRAFTED)
    measured: Measured = {decode.draft_tokens: _rows(plain, drafted, decode.draft_tokens)}
    failed: dict[int, str] = {}
    spent = int(read_json(spec.inputs["tune"] / "result.json")["loads"]) if "tune" in spec.inputs else 0
    for _ in range(bench.max_loads - spent):
        chosen = _next([k for k in lengths if k not in measured and k not in failed], accepts, measured)
        if chosen is None:
            break
        try:
            measured[chosen] = _rows(plain, _measure(spec, chosen, out, progress), chosen)
        except UserError as error:
            failed[chosen] = str(error)
    return judge(lengths, accepts, measured, failed)


def judge(lengths: list[int], accepts: dict[int, float], measured: Measured, failed: dict[int, str]) -> dict[str, Any]:
    """The table, the best length of each concurrency, and the `crossover`: the largest measured concurrency at which
    drafting pays where it does not at the next one (null: it pays at all of them, or at none).

    A measured length is predicted from the others' costs, so that its two figures are independent; `basis` says what
    a prediction rests on (`Costs.basis`).
    """
    unmeasured = {
        k: "bench.max_loads was spent before" if _next([k], accepts, measured) else "others were predicted to be faster"
        for k in lengths
        if k not in measured
    }
    rows: list[dict[str, Any]] = []
    best: list[dict[str, Any]] = []
    for concurrency in sorted(next(iter(measured.values()))):
        here: list[dict[str, Any]] = []
        for k in lengths:
            there = measured.get(k, {}).get(concurrency)
            others = {one: found for one, found in measured.items() if one != k and concurrency in found}
            costs = _costs(others or measured, concurrency)
            predicted = {"accept_length": accepts[k], "speedup": costs.speedup(k, accepts[k]), "basis": costs.basis(k)}
            here.append(
                {
                    "draft_tokens": k,
                    "concurrency": concurrency,
                    "predicted": predicted,
                    "measured": there["ratio"] if there else None,
                    "reason": failed.get(k) or (None if there else unmeasured[k]),
                }
            )
        rows += here
        tried = [row for row in here if row["measured"] and row["measured"]["ratio"] is not None]
        first = max(tried, key=lambda row: float(row["measured"]["ratio"]))
        best.append(
            {"concurrency": concurrency, "draft_tokens": first["draft_tokens"], "speedup": first["measured"]["ratio"]}
        )
    paying = [row["concurrency"] for row in best if row["speedup"] > 1]
    ends = len(paying) < len(best) and paying == [row["concurrency"] for row in best][: len(paying)]
    return {
        "rows": rows,
        "best": best,
        "crossover": paying[-1] if paying and ends else None,
        "loads": len(measured) - 1 + len(failed),
    }


def _accept_length(spec: StepSpec, draft_tokens: int, progress: Progress) -> float:
    """Replay of all held-out answers with this many draft tokens; looping ones count, as they do in the times."""
    progress.milestone(f"replaying {draft_tokens} draft tokens")
    target = targets.read(spec.inputs["target"])
    store = FeatureStore.open(spec.inputs["capture"] / "heldout", target=target)
    draft = load_draft(spec.inputs["export"], target, torch.float32, pick_device(spec.section(Engine)))
    return cost.accept_length({"acceptance": acceptance(draft, store, draft_tokens)}) or 1.0


def _rows(
    plain: dict[Figure, list[Block]], drafted: dict[Figure, list[Block]], draft_tokens: int
) -> dict[int, dict[str, Any]]:
    """The greedy bench rows on the held-out prompts, by concurrency. Raises UserError: there are none."""
    config = Decode(draft_tokens=draft_tokens)
    found = {row["concurrency"]: row for row in baseline.rows(plain, drafted, config) if _counts(row)}
    if not found:
        raise UserError(
            f"bench: the sweep needs greedy figures on `{HELDOUT}` with answers of several tokens: add it to "
            "bench.workloads, 0.0 to bench.temperatures, and raise bench.max_new_tokens"
        )
    return found


def _counts(row: dict[str, Any]) -> bool:
    greedy = row["workload"] == HELDOUT and row["temperature"] == 0
    return bool(greedy and row["token_seconds"] and row["round_seconds"] and row["ratio"]["ratio"])


def _costs(measured: Measured, concurrency: int) -> Costs:
    rows = {k: found[concurrency] for k, found in measured.items() if concurrency in found}
    token = next(iter(rows.values()))["token_seconds"]
    return Costs(token, {k: row["round_seconds"] for k, row in rows.items()})


def _next(left: list[int], accepts: dict[int, float], measured: Measured) -> int | None:
    """The length whose best prediction beats the best measured speed-up of a concurrency by most; None: none does."""
    gains = {}
    for k in left:
        gain = []
        for concurrency in next(iter(measured.values())):
            costs = _costs(measured, concurrency)
            known = [found[concurrency]["ratio"]["ratio"] for found in measured.values() if concurrency in found]
            gain.append(costs.speedup(k, accepts[k]) / max(known))
        gains[k] = max(gain)
    best = max(gains, key=lambda k: gains[k], default=None)
    return best if best is not None and gains[best] > 1 else None


def _measure(spec: StepSpec, draft_tokens: int, out: Path, progress: Progress) -> dict[Figure, list[Block]]:
    """The greedy figures of a server that drafts this many tokens; what an earlier attempt found takes no load.

    Raises UserError: the server does not start, or ended meanwhile; a later attempt does not try again.
    """
    folder = out / f"tokens{draft_tokens}"
    folder.mkdir(exist_ok=True)
    if (cause := folder / "failed.json").exists():
        raise UserError(read_json(cause))
    # Only what the sweep compares; the spec's other figures are the decode step's.
    asked = {**spec.config["bench"], "workloads": [HELDOUT], "temperatures": [0.0]}
    narrow = StepSpec(spec.step, spec.seed, {**spec.config, "bench": asked}, spec.inputs, spec.services)
    there = baseline.read_blocks(folder, DRAFTED)
    if there.keys() >= set(baseline.figures(narrow.section(Bench))):
        return there
    target = targets.read(spec.inputs["target"])
    store = FeatureStore.open(spec.inputs["capture"] / "heldout", target=target)
    config, dtype = tuned(spec.section(Server), spec.inputs), spec.section(Target).dtype
    draft = Draft(spec.inputs["export"], draft_tokens)
    try:
        with started(config, target.folder, dtype, folder / "server", progress, capture=False, draft=draft) as running:
            try:
                return baseline.take(running.endpoint.url, narrow, store, target, draft_tokens, folder, progress)
            except ServerDied as error:
                why = str(error) if running.alive() else running.why(config.python)
                raise UserError(f"the server ended while it was measured: {why}; log: {running.log}") from error
    except UserError as error:
        write_json(cause, str(error))
        raise
