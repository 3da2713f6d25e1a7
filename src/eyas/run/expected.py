"""How long the steps of one plan are expected to take, from this user's history, to which it adds."""

import contextlib
import sqlite3
import time
from dataclasses import dataclass

from eyas.plan import durations
from eyas.plan.digests import Plan, Planned
from eyas.plan.durations import Estimate, Kind, Row
from eyas.run.folder import StepFolder, read_or_empty
from eyas.run.machine import Machine
from eyas.run.outputs import LIST


@dataclass
class Expected:
    """Estimates for a plan on a machine."""

    plan: Plan
    machine: Machine
    history: durations.History

    def step(self, planned: Planned) -> Estimate:
        """The work of one step, from the beginning."""
        return self.history.expect(self._kind(planned), planned.step.work)

    def service(self, planned: Planned) -> Estimate:
        """The load of one service."""
        return self.history.expect(self._kind(planned, self._warm()), None)

    def steps(self) -> dict[str, Estimate]:
        """Of all steps."""
        return {planned.name: self.step(planned) for planned in self.plan.steps}

    def services(self) -> dict[str, Estimate]:
        """Of the loads of all services."""
        return {planned.name: self.service(planned) for planned in self.plan.services}

    def record(self, planned: Planned, seconds: float, finished: bool, bytes_: float = 0.0) -> str | None:
        """Add what a step, or the load of a service, took; what stood in the way, if it could not be kept."""
        is_service = any(planned is service for service in self.plan.services)
        kind, machine = self._kind(planned, is_service and self._warm()), self.machine
        row = Row(
            *(time.time(), kind.entry, kind.name, kind.host, machine.boot, kind.device, kind.model, kind.warm),
            *(planned.step.work, round(seconds, 3), bytes_, finished),
        )
        self.history.add(row)
        try:
            durations.add(row)
        except (OSError, sqlite3.Error) as error:
            return f"{durations.place()}: durations are not kept ({error})"
        return None

    def _kind(self, planned: Planned, warm: bool = False) -> Kind:
        machine = self.machine
        return Kind(planned.step.entry, planned.name, machine.host, machine.device, machine.model, warm)

    def _warm(self) -> bool:
        entries = {service.step.entry for service in self.plan.services}
        return self.history.warm(self.machine.host, self.machine.boot, self.machine.model, entries)


def here(plan: Plan, machine: Machine) -> Expected:
    """What this user's history says about a plan."""
    return Expected(plan, machine, durations.read())


def size(folder: StepFolder) -> float:
    """Bytes of a finished output, as it lists them."""
    found = 0.0
    with contextlib.suppress(AttributeError, TypeError):
        for entry in read_or_empty(folder.out / LIST).get("files", {}).values():
            found += entry.get("size", 0)
    return found
