"""How long the steps of one plan are expected to take, from this user's history, to which it adds."""

import contextlib
import sqlite3
import time
from dataclasses import dataclass

from eyas.plan import durations
from eyas.plan.digests import Plan, Planned
from eyas.plan.durations import Estimate, Kind, Mark, Row
from eyas.run.folder import StepFolder, read_or_empty
from eyas.run.machine import Machine
from eyas.run.outputs import LIST
from eyas.run.protocol import ProgressState

SHORTEST_SECONDS = 10.0
"""Of what takes less, nobody needs to know how far it is."""


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

    def share(self, planned: Planned, progress: ProgressState, now: float) -> float | None:
        """Of its work, how much a running step or loading service has done: as it says, or its last milestone."""
        if progress.total:
            return min(1.0, progress.done / progress.total)
        if not progress.milestones or progress.started is None:
            return None
        t, text = progress.milestones[-1]
        share = self.history.share(self._kind(planned), text)
        if share is None or t <= progress.started:
            return None
        # Told of the moment of the milestone; since then as much more as time went by.
        return min(1.0, share * (now - progress.started) / (t - progress.started))

    def record(
        self,
        planned: Planned,
        seconds: float,
        finished: bool,
        bytes_: float = 0.0,
        progress: ProgressState | None = None,
    ) -> str | None:
        """Add what a step, or the load of a service, took; what stood in the way, if it could not be kept."""
        is_service = any(planned is service for service in self.plan.services)
        kind, machine = self._kind(planned, is_service and self._warm()), self.machine
        row = Row(
            *(time.time(), kind.entry, kind.name, kind.host, machine.boot, kind.device, kind.model, kind.warm),
            *(planned.step.work, round(seconds, 3), bytes_, finished),
        )
        marks = _marks(row, progress) if progress and finished else []
        self.history.add(row, marks)
        try:
            durations.add(row, marks)
        except (OSError, sqlite3.Error) as error:
            return f"{durations.place()}: durations are not kept ({error})"
        return None

    def _kind(self, planned: Planned, warm: bool = False) -> Kind:
        machine = self.machine
        return Kind(planned.step.entry, planned.name, machine.host, machine.device, machine.model, warm)

    def _warm(self) -> bool:
        entries = {service.step.entry for service in self.plan.services}
        return self.history.warm(self.machine.host, self.machine.boot, self.machine.model, entries)


def _marks(row: Row, progress: ProgressState) -> list[Mark]:
    """Where a step's milestones stood in its time; none of a step that was done in no time."""
    if progress.started is None or row.seconds < SHORTEST_SECONDS:
        return []
    said = {durations.numberless(text): t - progress.started for t, text in progress.milestones}
    return [
        Mark(row.t, row.entry, row.device, row.model, text, since / row.seconds)
        for text, since in said.items()
        if 0 < since < row.seconds
    ]


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
