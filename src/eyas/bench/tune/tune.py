"""`eyas tune`, whole: machine, space, stand-alone all-reduce, trials, confirmation, outcome."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eyas.bench import workloads
from eyas.bench.tune import contest, machine
from eyas.bench.tune.search import Confirmation, Row, choose, confirm, search
from eyas.bench.tune.space import DEFAULT, FLAGS, Setting, facts, grid_loads, nccl_candidates, space
from eyas.bench.tune.trial import Question, Trials
from eyas.config import LATENCY, Bench, Prompts, RunConfig, Server, Target, Tune, require_tunable
from eyas.digests import digest_json
from eyas.engines import target as targets
from eyas.engines.sglang.command import shell
from eyas.engines.target import TargetInfo
from eyas.errors import UserError
from eyas.files import write_json
from eyas.progress import Progress
from eyas.spec import StepSpec

RESULT = "tune.json"


def run(config: RunConfig, folder: Path, progress: Progress) -> dict[str, Any]:
    """Tune as a run file says; the outcome, which is also written to tune.json in `folder`. Trials that an earlier call
    finished there are not made again. Raises UserError: it cannot be tuned, or the default does not serve."""
    require_tunable(config)
    target = targets.inspect(config.target.model, progress)
    found = tune(config.server, target, config.target, config.bench, config.tune, config.prompts, folder, progress)
    write_json(folder / RESULT, found)
    return found


def step(spec: StepSpec, out: Path, progress: Progress) -> dict[str, Any]:
    """Step entry; starts servers itself. Every server of the run takes the winner's settings (`command.tuned`)."""
    target = targets.read(spec.inputs["target"])
    config, model, prompts = spec.section(Server), spec.section(Target), spec.section(Prompts)
    return tune(config, target, model, spec.section(Bench), spec.section(Tune), prompts, out, progress)


def tune(
    config: Server,
    target: TargetInfo,
    model: Target,
    bench: Bench,
    wanted: Tune,
    prompts: Prompts,
    folder: Path,
    progress: Progress,
) -> dict[str, Any]:
    """The outcome, as docs/seams.md has it. Raises UserError."""
    folder.mkdir(parents=True, exist_ok=True)
    kwargs = model.chat_template_kwargs
    asked = workloads.prompts(bench.workloads[0], bench.prompts, target, None, kwargs, prompts.heldout)
    progress.milestone("looking at the machine and its SGLang")
    host = machine.read(config, FLAGS)
    known = facts(host, config, wanted, target.text_config, {})
    candidates, no_nccl = nccl_candidates(known)
    factors, left = space(known)
    played, default, confirmation = None, None, None
    rows: list[Row] = []
    question = Question(asked, wanted.concurrencies, bench.rounds, bench.max_new_tokens, wanted.deadline)
    trials = Trials(config, target, model.dtype, host.version, question, folder / "trials", progress)
    if factors or candidates:
        played = _contest(config, target, model, wanted, candidates, folder, progress)
        with trials:
            default = trials.take(DEFAULT, lambda _: False)
            if default.failed:
                trials.forget(DEFAULT)
                raise UserError(f"the run file's own configuration cannot be measured: {default.failed}")
            best = played["best"] if played else ()
            factors, left = space(facts(host, config, wanted, target.text_config, default.served, best))
            rows = search(default, factors, trials, bench.max_loads)
            if chosen := choose(rows):
                confirmation = confirm(chosen.setting, trials)
    winner, why = outcome(rows, confirmation)
    return {
        "goal": wanted.goal or LATENCY,
        "concurrencies": wanted.concurrencies,
        "machine": host.to_json(),
        "left_out": [{"name": one.name, "why": one.why} for one in [*no_nccl, *left]],
        "all_reduce": played,
        "default": Row("default", DEFAULT, default).to_json() if default else None,
        "trials": [row.to_json() for row in rows],
        "confirmation": confirmation.to_json() if confirmation else None,
        "winner": winner.to_json(),
        "default_kept": winner == DEFAULT,
        "why": why,
        "loads": trials.loads,
        "grid_loads": grid_loads(factors),
        "launch": shell(winner.apply(config), target.folder, model.dtype),
        "run_file": {"server": {"args": dict(winner.flags), "env": dict(winner.env)}},
    }


def outcome(rows: Sequence[Row], confirmation: Confirmation | None) -> tuple[Setting, str]:
    """The winner and why it is that."""
    chosen = choose(rows)
    if not rows:
        return DEFAULT, "nothing that could be set matters here"
    if chosen is None or confirmation is None:
        return DEFAULT, "no setting is measurably faster than the default"
    if confirmation.why:
        return DEFAULT, f"{chosen.setting.name}: {confirmation.why}"
    return chosen.setting, "confirmed in turns with the default, over reloads"


def _contest(
    config: Server,
    target: TargetInfo,
    model: Target,
    wanted: Tune,
    candidates: Sequence[dict[str, str]],
    folder: Path,
    progress: Progress,
) -> dict[str, Any] | None:
    if not candidates:
        return None
    own = target.config.get("dtype") or target.config.get("torch_dtype") or "bfloat16"
    dtype = str(own) if model.dtype == "auto" else model.dtype
    group = contest.group(config, target.hidden_size, wanted.concurrencies, dtype, folder)
    asked = digest_json([group.elements, dtype, group.world, group.first, group.python, dict(config.env)])
    played = contest.play(candidates, group.run, folder / f"allreduce-{asked[:8]}", progress)
    return {"elements": list(group.elements), "dtype": dtype, **played}
