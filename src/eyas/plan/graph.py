"""The graph of a run: which steps there are, what each reads, needs and takes.

The names, entries and needs are the table of docs/seams.md.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from eyas.config import RunConfig
from eyas.digests import digest_file, digest_sampled
from eyas.errors import UserError

SERVICE = "eyas.engines.sglang.service:"
INCIDENTAL = {"server": frozenset({"port", "patience", "concurrency"})}
"""Fields that change how a step comes to its output, not the output: editing them runs nothing again."""
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
    """What it takes whole: no two steps with a common resource run at once."""
    leases: tuple[str, ...] = ()
    """Services that must answer while it runs."""
    work: float | None = None
    """Estimate of its work, comparable between runs of the same step; None while unknown."""
    product: bool = False
    """Its output is wanted for itself, though other steps need it."""
    outside: tuple[tuple[str, str], ...] = ()
    """Files that the run does not own: path and digest."""


def build(config: RunConfig) -> tuple[Step, ...]:
    """The steps of a run file. Raises UserError: a file that it names is missing."""
    return _served(config) if config.engine.kind == "sglang" else _in_process(config)


def build_services(config: RunConfig) -> tuple[Step, ...]:
    """The services that the steps of a run file lease."""
    if config.engine.kind != "sglang":
        return ()
    sections = ("target", "engine", "server", "capture")
    return (
        # Needs the twin, so that a large target is loaded only once a tiny one has passed.
        Step("server", SERVICE + "serve", needs=("target", *_twin(config)), sections=sections),
        Step("drafted", SERVICE + "serve_drafted", needs=("target", "export"), sections=(*sections, "decode")),
    )[: 1 if config.server.url else 2]


def _twin(config: RunConfig) -> tuple[str, ...]:
    """The twin step, where there is one: an existing server is taken as it is."""
    return ("twin",) if config.server.twin and config.server.url is None else ()


def _served(config: RunConfig) -> tuple[Step, ...]:
    """The steps of a run whose target is served by SGLang; those after the capture are the in-process ones."""
    cpu, lease = ("cpu",), ("server",)
    steps = {step.name: step for step in _in_process(config)}
    twin = tuple(
        Step(
            name,
            "eyas.engines.sglang.twin:run",
            needs=("target",),
            sections=("target", "engine", "server", "capture"),
            resources=cpu,
        )
        for name in _twin(config)
    )
    answers, capture, decode = steps["answers"], steps["capture"], steps["decode"]
    # An existing server is not ours to start with a draft: then nothing is served, and the verdict says so.
    measured = config.server.url is None
    baseline = (
        Step(
            "baseline",
            "eyas.bench.baseline:run",
            needs=("target", "capture"),
            sections=("server", "answers", "decode"),
            resources=cpu,
            leases=lease,
        ),
    )[:measured]
    served = (
        replace(
            decode,
            entry="eyas.bench.served:run",
            needs=(*decode.needs, "baseline"),
            sections=(*decode.sections, "server"),
            leases=("drafted",),
        ),
    )[:measured]
    without_decode = tuple(need for need in steps["verdict"].needs if need != "decode")
    return (
        steps["target"],
        *twin,
        steps["prompts"],
        Step(
            "doctor",
            "eyas.engines.sglang.doctor:run",
            needs=("target", *_twin(config)),
            sections=("target", "engine", "server", "capture"),
            resources=cpu,
            leases=lease,
        ),
        replace(
            answers,
            entry="eyas.engines.sglang.answers:run",
            needs=(*answers.needs, "doctor"),
            sections=("target", "server", "answers"),
            leases=lease,
        ),
        replace(
            capture,
            entry="eyas.capture.served:run",
            sections=("target", "engine", "server", "capture"),
            leases=lease,
        ),
        *baseline,
        steps["vocabulary"],
        steps["train"],
        steps["export"],
        steps["replay"],
        *served,
        steps["verdict"] if served else replace(steps["verdict"], needs=without_decode),
    )


def _in_process(config: RunConfig) -> tuple[Step, ...]:
    """The steps of a run whose target runs in the steps' own processes."""
    cpu = ("cpu",)
    train, heldout = config.prompts.train_limit, config.prompts.heldout_limit
    rows = float(train + heldout) if train and heldout else None
    decoded = config.decode.prompts or heldout
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
            sections=("target", "prompts"),
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
            sections=("target", "engine", "answers", "capture"),
            resources=cpu,
            work=rows,
        ),
        Step("vocabulary", "eyas.draft.vocabulary:run", needs=("target", "capture"), sections=("draft",)),
        Step(
            "train",
            "eyas.train.step:run",
            needs=("target", "capture", "vocabulary"),
            sections=("engine", "draft", "train"),
            resources=cpu,
            work=train * config.train.epochs if train else None,
        ),
        Step(
            "export",
            "eyas.draft.export:run",
            needs=("target", "capture", "train"),
            sections=("target", "prompts", "answers"),
            product=True,
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
            sections=("engine", "answers", "decode"),
            resources=cpu,
            work=float(decoded) if decoded else None,
        ),
        Step(
            "verdict",
            "eyas.bench.verdict:run",
            needs=("replay", "decode", "train", "vocabulary", "capture"),
            sections=("decode",),
        ),
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
        if name != "builtin":
            try:
                files[name] = digest_file(Path(name))
            except OSError as error:
                raise UserError(f"prompts.{field}: cannot read {name} ({error.strerror})") from error
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
