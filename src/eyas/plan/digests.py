"""A plan: the steps in order, each with the digest that names its output.

The digest of a step covers name, entry, code, its sections of the run file, the seed, the outside files that it names
(weights by samples, `digests.digest_sampled`), and the digests of the steps and services that it needs. It does not
cover the versions of Python and of the libraries, nor the machine: what `auto` (engine.device, the dtypes) and no
engine.threads come to there. After such a change, delete the folders of the steps that are to run again.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from eyas.digests import digest_json
from eyas.plan import code
from eyas.plan.graph import INCIDENTAL, Step, in_order


@dataclass(frozen=True)
class Planned:
    """One step (or service) of a plan."""

    step: Step
    digest: str
    code: str
    config: dict[str, Any]
    """The sections that it reads, as JSON values."""
    inputs: dict[str, str]
    """Digests of the steps that it needs."""

    @property
    def name(self) -> str:
        """The step's name."""
        return self.step.name


@dataclass(frozen=True)
class Plan:
    """A whole run: everything is known before anything starts."""

    seed: int
    steps: tuple[Planned, ...]
    """Each after all that it needs."""
    services: tuple[Planned, ...] = ()

    def service(self, name: str) -> Planned:
        """The service of this name."""
        return next(service for service in self.services if service.name == name)

    def needs(self, planned: Planned) -> set[str]:
        """The steps that must be finished before this one starts: its own needs and those of its services."""
        return set(planned.step.needs).union(*(self.service(name).step.needs for name in planned.step.leases))

    def needed(self, sound: set[str]) -> set[str]:
        """The steps whose outputs this run needs, `sound` being those that have one: the ends of the graph, the
        products, and what the steps that are still to run need. All others would be made for nobody."""
        found: set[str] = set()
        read: set[str] = set()
        ends = {planned.name for planned in self.steps}.difference(*(self.needs(planned) for planned in self.steps))
        for planned in reversed(self.steps):
            if planned.name in ends | read or planned.step.product:
                found.add(planned.name)
                if planned.name not in sound:
                    read |= self.needs(planned)
        return found


def make(
    steps: tuple[Step, ...],
    sections: Mapping[str, Any],
    seed: int,
    services: tuple[Step, ...] = (),
    keep: Callable[[str, Mapping[str, Any]], str | None] | None = None,
) -> Plan:
    """Order the steps and compute their digests; `sections` is the run file as JSON values.

    `keep` may name another digest for a step, given its name and what its own one covers (`run/keep.py`). Raises
    UserError: an entry whose module is not there.
    """
    by_name = {service.name: service for service in services}
    made: dict[str, Planned] = {}
    served: dict[str, Planned] = {}

    def planned(step: Step) -> Planned:
        config = {name: step.section(name, sections[name]) for name in step.sections}
        inputs = {name: made[name].digest for name in step.needs}
        code_digest = code.digest(step.entry)
        content = {
            "step": step.name,
            "entry": step.entry,
            "code": code_digest,
            "config": {name: _counted(name, section) for name, section in config.items()},
            "seed": seed,
            "outside": dict(step.outside),
            "inputs": inputs,
            "services": {name: served[name].digest for name in step.leases},
        }
        kept = keep(step.name, content) if keep and step.name not in by_name else None
        return Planned(step, kept or digest_json(content), code_digest, config, inputs)

    for step in in_order(steps, services):
        for name in step.leases:
            if name not in served:
                served[name] = planned(by_name[name])
        made[step.name] = planned(step)
    return Plan(seed, tuple(made.values()), tuple(served.values()))


def _counted(name: str, section: Any) -> Any:
    """A section less the fields that change no output."""
    left_out = INCIDENTAL.get(name)
    return section if left_out is None else {key: value for key, value in section.items() if key not in left_out}
