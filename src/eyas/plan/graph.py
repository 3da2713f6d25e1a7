"""The graph of a run: which steps there are, what each reads, needs and takes.

The names, entries and needs are the table of docs/seams.md.
"""

from dataclasses import dataclass
from pathlib import Path

from eyas.config import RunConfig
from eyas.digests import digest_file, digest_sampled
from eyas.errors import UserError

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
