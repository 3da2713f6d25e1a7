"""Finished work whose code was edited, and nothing else: whether it is run again is asked, never decided.

An output that is kept goes by its old digest, so that what follows keeps its inputs. That it stands for the new one is
written beside it (`kept.json`), so that nobody is asked twice.
"""

import itertools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eyas.digests import digest_json
from eyas.errors import UserError
from eyas.files import write_json
from eyas.plan.digests import Plan
from eyas.run import outputs
from eyas.run.folder import RunFolder, StepFolder, read_or_empty

ASK_SECONDS = 60.0
"""What takes less is run again without a question."""
MARK = "kept.json"

Content = Mapping[str, Any]
Make = Callable[[Callable[[str, Content], str | None] | None], Plan]
"""Makes the plan; what it is given may name another digest for a step."""


@dataclass
class Choice:
    """The plan in which everything finished is kept, and what the plain one would run again."""

    plan: Plan
    plain: Plan
    asked: dict[str, str] = field(default_factory=dict)
    """Steps that are kept in `plan` although nobody has decided so: the digest they would have."""
    lost: dict[str, float] = field(default_factory=dict)
    """Finished steps that the plain plan runs again, and the seconds that each took."""

    @property
    def open(self) -> bool:
        """Whether somebody should be asked."""
        return bool(self.asked) and self.seconds >= ASK_SECONDS

    @property
    def undecided(self) -> Plan:
        """The plan as long as nobody is asked: what costs little is run again."""
        return self.plain if self.asked and not self.open else self.plan

    @property
    def seconds(self) -> float:
        """What the plain plan costs more."""
        return sum(self.lost.values())


def choose(folder: Path, make: Make, only: Collection[str] | None = None) -> Choice:
    """Find what may be kept (of the steps in `only`, if given)."""
    run = RunFolder(folder)
    asked: dict[str, str] = {}

    def keep(step: str, content: Content) -> str | None:
        digest = digest_json(content)
        home = folder / "steps" / step
        if (home / digest).exists() or not home.is_dir():
            return None
        for old in sorted(home.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True):
            decided = digest in read_or_empty(old / MARK).get("stands_for", [])
            wanted = decided or only is None or step in only
            if wanted and _only_code(folder, old, content) and outputs.verify(old / "out") is None:
                if not decided:
                    asked[step] = digest
                return old.name
        return None

    plan, plain = make(keep), make(None)
    needed = plain.needed({one.name for one in plain.steps if run.step(one).finished})
    lost = {
        new.name: StepFolder(run.step(old).path).seconds() or 0.0
        for old, new in zip(plan.steps, plain.steps, strict=True)
        if run.step(old).finished and not run.step(new).finished and new.name in needed
    }
    return Choice(plan, plain, asked, lost)


def decide(folder: Path, choice: Choice) -> None:
    """Write down that what `choice.plan` keeps stands for what it would be now."""
    for planned in choice.plan.steps:
        if planned.name in choice.asked:
            mark = RunFolder(folder).step(planned).path / MARK
            known = read_or_empty(mark).get("stands_for", [])
            write_json(mark, {"stands_for": [*known, choice.asked[planned.name]]})


def refuse_unknown(plan: Plan, steps: Collection[str]) -> None:
    """Raises UserError for a step to keep that the run does not have."""
    if unknown := set(steps) - {planned.name for planned in plan.steps}:
        raise UserError(f"--keep {', '.join(sorted(unknown))}: no such step")


def _only_code(folder: Path, old: Path, content: Content) -> bool:
    """Whether an old output differs in its code, or in that of its services, and in nothing else."""
    if not StepFolder(old).finished:
        return False
    codes = {read_or_empty(old / "spec.json").get("code"), content["code"]}
    homes = [folder / "services" / name for name in content["services"]]
    known = [[path.name for path in home.iterdir()] if home.is_dir() else [] for home in homes]
    for code, served in itertools.product(codes, itertools.product(*known)):
        services = dict(zip(content["services"], served, strict=True))
        if digest_json({**content, "code": code, "services": services}) == old.name:
            return True
    return False
