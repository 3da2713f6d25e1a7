"""The graph of a run: which steps there are, what each reads, needs and takes.

The names, entries and needs are the table of docs/seams.md.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import JsonValue

from eyas import datafiles
from eyas.config import RunConfig, require_tunable
from eyas.digests import digest_bytes, digest_file, digest_sampled
from eyas.errors import UserError

SERVICE = "eyas.engines.sglang.service:"
INCIDENTAL = {"server": frozenset({"port", "patience", "concurrency"}), "store": frozenset({"keep"})}
"""Fields that change how a step comes to its output, not the output: editing them runs nothing again."""
PILOT = "pilot-"
PILOTED = (
    "prompts", "answers", "capture", "baseline", "vocabulary", "train", "export", "replay", "decode", "drafted",
)  # fmt: skip
PILOT_SHARE, PILOT_HELDOUT = 4, 100
BUILTIN_PROMPTS, BUILTIN_HELDOUT = 1515, 164
UNKNOWN_COUNT = 10**9
NO_SWEEP: tuple[tuple[str, str, JsonValue], ...] = (
    ("bench", "sweep", []), ("bench", "max_loads", 0), ("bench", "again", True), ("bench", "break_even", False),
)  # fmt: skip
"""Of the steps that measure one server: what else is measured does not run them again."""
ONLY_LOADS: tuple[tuple[str, str, JsonValue], ...] = (
    ("bench", "sweep", []), ("bench", "again", True), ("bench", "concurrencies", [1]), ("bench", "temperatures", [0.0]),
    ("bench", "break_even", False),
)  # fmt: skip
"""Of the tune step: its goal says what is measured."""
CONTENT_SUFFIXES = (".json", ".jinja", ".txt", ".model", ".tiktoken", ".py")


@dataclass(frozen=True)
class Step:
    """A step, or a service that steps lease, as it is declared."""

    name: str
    entry: str
    """`package.module:function`."""
    needs: tuple[str, ...] = ()
    sections: tuple[str, ...] = ()
    """The fewest sections of the run file that it needs: editing any other does not run it again."""
    resources: tuple[str, ...] = ()
    """What it takes whole: no two steps with a common resource run at once. A service holds its own from the start of
    its load to its end, and shares them with the steps that lease it."""
    leases: tuple[str, ...] = ()
    """Services that must answer while it runs."""
    work: float | None = None
    """Estimate of its work, comparable between runs of the same step; None while unknown."""
    product: bool = False
    """Its output is wanted for itself, though other steps need it."""
    outside: tuple[tuple[str, str], ...] = ()
    """Files that the run does not own: path and digest."""
    alone: bool = False
    """It measures time: nothing else runs beside it, nor a service that it does not lease."""
    roles: tuple[tuple[str, str], ...] = ()
    """What a needed step stands for where it is not that by name: (pilot-capture, capture)."""
    fixed: tuple[tuple[str, str, JsonValue], ...] = ()
    """Section, field, value: what holds for this step whatever the run file says."""

    def role(self, need: str) -> str:
        """The name by which its entry finds a needed step's output, or a leased service."""
        return dict(self.roles).get(need, need)

    def section(self, name: str, section: JsonValue) -> JsonValue:
        """The section of the run file as this step reads it."""
        changed = {key: value for where, key, value in self.fixed if where == name}
        return {**section, **changed} if isinstance(section, dict) and changed else section


def build(config: RunConfig) -> tuple[Step, ...]:
    """The steps of a run file. Raises UserError: a file that it names is missing, or there is nothing to tune."""
    if _tuned(config):
        require_tunable(config)
    return _served(config) if config.engine.kind == "sglang" else _in_process(config)


def build_services(config: RunConfig) -> tuple[Step, ...]:
    """The services that the steps of a run file lease."""
    if config.engine.kind != "sglang":
        return ()
    sections = ("target", "engine", "server", "capture")
    before = ("target", *_twin(config), *_tuned(config))
    # Needs the twin, so that a large target is loaded only once a tiny one has passed.
    cpu = ("cpu",)
    server = Step("server", SERVICE + "serve", needs=before, sections=sections, resources=cpu)
    if config.server.url:
        return (server,)
    drafted = Step(
        "drafted",
        SERVICE + "serve_drafted",
        needs=(*before, "export"),
        sections=(*sections, "decode"),
        resources=cpu,
    )
    # Comes after the decode step, so that it is a load of its own and not the one that captures.
    plain = Step("plain", SERVICE + "serve_plain", needs=(*before, "decode"), sections=sections, resources=cpu)
    pilot = (_of_pilot(drafted),) if _pilot(config) else ()
    untrained = replace(
        drafted, name="random", needs=(*before, "random-draft"), roles=(("random-draft", "export"),)
    )  # fmt: skip
    return (server, *(untrained,) * config.bench.break_even, *pilot, drafted, *(plain,) * config.bench.again)


def _twin(config: RunConfig) -> tuple[str, ...]:
    """The twin step, where there is one: an existing server is taken as it is."""
    return ("twin",) if config.server.twin and config.server.url is None else ()


def _tuned(config: RunConfig) -> tuple[str, ...]:
    """The tune step, where the run file states a goal."""
    return ("tune",) if config.tune.goal is not None else ()


def _pilot(config: RunConfig) -> bool:
    """Whether a small run comes first: it has to be small beside the full one, and the server ours."""
    small = 0 < PILOT_SHARE * config.pilot.samples <= _count(config, "train")
    return small and config.engine.kind == "sglang" and config.server.url is None


def _count(config: RunConfig, split: str) -> int:
    """The most prompts that a split of the run file can have: "train" or "heldout"."""
    source, limit = getattr(config.prompts, split), getattr(config.prompts, f"{split}_limit")
    count: int = limit or UNKNOWN_COUNT
    if source == "builtin":
        count = min(count, BUILTIN_PROMPTS if split == "train" else BUILTIN_HELDOUT)
    elif Path(source).suffix in (".txt", ".jsonl") and Path(source).is_file():
        with Path(source).open("rb") as file:
            count = min(count, sum(1 for _ in file))
    return count


def _of_pilot(step: Step) -> Step:
    """The same step or service in the small run, which reads the small run's outputs."""
    of = {name: PILOT + name for name in PILOTED}
    return replace(
        step,
        name=of.get(step.name, step.name),
        needs=tuple(of.get(name, name) for name in step.needs),
        leases=tuple(of.get(name, name) for name in step.leases),
        roles=tuple((of[name], name) for name in (*step.needs, *step.leases) if name in of),
        product=False,
    )


def _pilot_steps(config: RunConfig, steps: dict[str, Step]) -> tuple[Step, ...]:
    """The small run, from prompts to what its draft does when it is served, and the gate behind it."""
    limits: tuple[tuple[str, str, JsonValue], ...] = (
        ("prompts", "train_limit", config.pilot.samples),
        ("prompts", "heldout_limit", min(config.prompts.heldout_limit or PILOT_HELDOUT, PILOT_HELDOUT)),
    )
    prompts = config.prompts.model_copy(update={field: value for _, field, value in limits})
    work = {step.name: step.work for step in _in_process(config.model_copy(update={"prompts": prompts}))}
    small = [replace(_of_pilot(steps[name]), work=work.get(name)) for name in PILOTED if name in steps]
    small = [replace(step, fixed=(*step.fixed, *limits)) if "prompts" in step.sections else step for step in small]
    judged = ("train", "replay", "decode")
    gate = Step(
        "pilot",
        "eyas.bench.pilot:run",
        needs=("prompts", *(PILOT + name for name in judged)),
        roles=tuple((PILOT + name, name) for name in judged),
        sections=("pilot", "decode"),
    )
    return (*small, gate)


def _served(config: RunConfig) -> tuple[Step, ...]:
    """The steps of a run whose target is served by SGLang; those after the capture are the in-process ones."""
    cpu, lease = ("cpu",), ("server",)
    steps = {step.name: step for step in _in_process(config)}
    twin = _twin(config)
    server_sections = ("target", "engine", "server", "capture")
    steps["twin"] = Step(
        "twin", "eyas.engines.sglang.twin:run", needs=("target",), sections=server_sections, resources=cpu
    )
    tune = _tuned(config)
    steps["tune"] = Step(
        "tune",
        "eyas.bench.tune.tune:step",
        needs=("target", *twin),
        sections=("target", "engine", "server", "prompts", "bench", "tune"),
        resources=cpu,
        outside=_prompt_files(config),
        alone=True,
        fixed=ONLY_LOADS,
    )
    steps["doctor"] = Step(
        "doctor",
        "eyas.engines.sglang.doctor:run",
        needs=("target", *twin),
        sections=server_sections,
        resources=cpu,
        leases=lease,
    )
    steps["answers"] = replace(
        steps["answers"],
        entry="eyas.engines.sglang.answers:run",
        needs=("target", "prompts", "doctor"),
        sections=("target", "server", "answers"),
        leases=lease,
    )
    steps["capture"] = replace(
        steps["capture"], entry="eyas.capture.served:run", sections=(*server_sections, "store"), leases=lease
    )
    # An existing server is not ours to start with a draft: then nothing is served, and the verdict says so.
    if measured := config.server.url is None:
        sections = ("target", "engine", "server", "prompts", "answers", "decode", "bench")
        steps["baseline"] = Step(
            "baseline",
            "eyas.bench.baseline:run",
            needs=("target", "capture"),
            sections=sections,
            resources=cpu,
            leases=lease,
            alone=True,
            fixed=NO_SWEEP,
        )
        steps["decode"] = replace(
            steps["decode"],
            entry="eyas.bench.served:run",
            needs=("target", "capture", "export", "baseline"),
            sections=sections,
            leases=("drafted",),
            alone=True,
            fixed=NO_SWEEP,
        )
        steps["again"] = replace(
            steps["baseline"],
            name="again",
            entry="eyas.bench.again:run",
            needs=("target", "capture", "baseline", "decode"),
            leases=("plain",),
        )
        steps["random-draft"] = Step(
            "random-draft",
            "eyas.draft.placeholder:run",
            needs=("target",),
            sections=("target", "capture", "draft"),
        )
        steps["break-even"] = replace(
            steps["baseline"],
            name="break-even",
            entry="eyas.bench.breakeven:run",
            needs=("target", "capture", "baseline"),
            sections=(*sections, "pilot"),
            leases=("random",),
            roles=(("random", "drafted"),),
        )
        steps["sweep"] = Step(
            "sweep",
            "eyas.bench.sweep:run",
            needs=("target", "capture", "export", "baseline", "decode"),
            sections=sections,
            resources=cpu,
            alone=True,
        )
    for name in ("decode", "sweep"):
        if name in steps:
            steps[name] = replace(steps[name], needs=(*steps[name].needs, *tune))
    again = ("again",) if measured and config.bench.again else ()
    priced = ("break-even",) if measured and config.bench.break_even else ()
    steps["train"] = replace(steps["train"], needs=(*steps["train"].needs, *priced))
    sweep = ("sweep",) if measured and config.bench.sweep and config.bench.max_loads else ()
    pilot = ("pilot",) if _pilot(config) else ()
    drafts = tuple(name for name in ("candidates",) if name in steps)
    small = _pilot_steps(config, steps) if pilot else ()
    if pilot:
        steps["answers"] = replace(steps["answers"], needs=(*steps["answers"].needs, "pilot"))
    steps["verdict"] = replace(
        steps["verdict"],
        needs=(
            *(need for need in steps["verdict"].needs if need != "decode" or measured),
            *priced,
            *again,
            *sweep,
            *pilot,
        ),
    )
    first = ("target", *twin, *tune, "prompts", *(("random-draft",) if priced else ()), "doctor")
    last = (
        "answers", "capture", *(("baseline",) * measured), *priced, *drafts, "vocabulary", "train", "export", "replay",
        *(("decode",) * measured), *again, *sweep, "verdict",
    )  # fmt: skip
    return (*(steps[name] for name in first), *small, *(steps[name] for name in (*last, "card")))


def _in_process(config: RunConfig) -> tuple[Step, ...]:
    """The steps of a run whose target runs in the steps' own processes."""
    cpu = ("cpu",)
    train, heldout = (count % UNKNOWN_COUNT for count in (_count(config, "train"), _count(config, "heldout")))
    rows = float(train + heldout) if train and heldout else None
    decoded = config.decode.prompts or heldout
    existing = _draft_files((config.draft.existing,) if config.draft.existing else (), "draft.start")
    candidates = (
        Step(
            "candidates",
            "eyas.bench.candidates:run",
            needs=("target", "capture"),
            sections=("engine", "decode", "drafts"),
            resources=cpu,
            outside=_draft_files(config.drafts),
        ),
    )[: 1 if config.drafts else 0]
    return (
        Step(
            "target",
            "eyas.engines.target:run",
            sections=("target", "engine"),
            outside=_target_files(config.target.model),
        ),
        Step(
            "prompts",
            "eyas.corpus.step:run",
            needs=("target",),
            sections=("target", "prompts", "data"),
            outside=_prompt_files(config),
        ),
        Step(
            "answers",
            "eyas.engines.answers:run",
            needs=("target", "prompts"),
            sections=("target", "engine", "answers", "capture"),
            resources=cpu,
            work=rows,
        ),
        Step(
            "capture",
            "eyas.capture.step:run",
            needs=("target", "answers"),
            sections=("target", "engine", "answers", "capture", "store"),
            resources=cpu,
            work=rows,
        ),
        *candidates,
        Step(
            "vocabulary",
            "eyas.draft.vocabulary:run",
            needs=("target", "capture"),
            sections=("draft",),
            outside=existing,
        ),
        Step(
            "train",
            "eyas.train.step:run",
            needs=("target", "capture", "vocabulary"),
            sections=("engine", "draft", "train"),
            outside=existing,
            resources=cpu,
            work=train * config.train.epochs if train else None,
        ),
        Step(
            "export",
            "eyas.draft.export:run",
            needs=("target", "capture", "train"),
            sections=("target", "prompts", "answers"),
        ),
        Step(
            "replay",
            "eyas.decode.replay:run",
            needs=("target", "capture", "export"),
            sections=("engine", "decode"),
            resources=cpu,
            work=float(heldout) if heldout else None,
        ),
        Step(
            "decode",
            "eyas.decode.step:run",
            needs=("target", "capture", "export"),
            sections=("engine", "answers", "decode", "bench"),
            fixed=NO_SWEEP,
            resources=cpu,
            alone=True,
            work=float(decoded) if decoded else None,
        ),
        Step(
            "verdict",
            "eyas.bench.verdict:run",
            needs=(
                *("replay", "decode", "train", "vocabulary", "capture", "target", "export"),
                *(step.name for step in candidates),
            ),
            sections=("engine", "decode"),
        ),
        Step("card", "eyas.draft.card:run", needs=("export", "verdict"), product=True),
    )


def in_order(steps: tuple[Step, ...], services: tuple[Step, ...] = ()) -> tuple[Step, ...]:
    """The steps, each after all that it and its services need; otherwise as declared.

    Asserts that names are unique, that what is needed or leased exists, and that there is no cycle.
    """
    needs = {step.name: set(step.needs) for step in steps}
    leased = {service.name: set(service.needs) for service in services}
    assert len(needs) == len(steps), "two steps have the same name"
    for step in steps:
        for name in step.leases:
            assert name in leased, f"{step.name} leases {name}, which is no service"
            needs[step.name] |= leased[name]
        unknown = needs[step.name] - needs.keys()
        assert not unknown, f"{step.name} needs {', '.join(sorted(unknown))}, which is no step"
    ordered: dict[str, Step] = {}
    while len(ordered) < len(steps):
        ready = [s for s in steps if s.name not in ordered and needs[s.name] <= ordered.keys()]
        assert ready, f"steps need each other in a circle: {', '.join(s.name for s in steps if s.name not in ordered)}"
        ordered |= {step.name: step for step in ready}
    return tuple(ordered.values())


def _prompt_files(config: RunConfig) -> tuple[tuple[str, str], ...]:
    files = {}
    for field in ("train", "heldout"):
        name = getattr(config.prompts, field)
        if name == datafiles.BUILTIN:
            continue
        try:
            for path in datafiles.expand(name):
                # Of a data set only the name is known here.
                hub = path.startswith(datafiles.HUB)
                files[path] = digest_bytes(path.encode()) if hub else digest_file(Path(path))
        except OSError as error:
            raise UserError(f"prompts.{field}: cannot read {error.filename or name} ({error.strerror})") from error
        except UserError as error:
            raise UserError(f"prompts.{field}: {error}") from error
    return tuple(files.items())


def _draft_files(drafts: Sequence[str], field: str = "drafts") -> tuple[tuple[str, str], ...]:
    """Existing drafts: their config by content, weights by samples of it."""
    files: dict[str, str] = {}
    for folder in drafts:
        if not Path(folder).is_dir():
            raise UserError(f"{field}: {folder} is no folder; name the folders of exported drafts")
        files |= dict(_target_files(folder))
    return tuple(files.items())


def _target_files(model: str) -> tuple[tuple[str, str], ...]:
    """Config and tokenizer files by content, weights by samples of it."""
    folder = Path(model)
    if not folder.is_dir():
        return ()
    files = {}
    try:
        for path in sorted(folder.iterdir()):
            if path.suffix == ".safetensors":
                files[str(path)] = digest_sampled(path)
            elif path.suffix in CONTENT_SUFFIXES and path.is_file():
                files[str(path)] = digest_file(path)
    except OSError as error:
        raise UserError(f"target.model: cannot read {error.filename or model} ({error.strerror})") from error
    return tuple(files.items())
