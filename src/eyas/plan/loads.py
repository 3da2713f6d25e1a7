"""Which server loads a run takes, and what for. A load of a large target is minutes: each must have a reason."""

from dataclasses import dataclass

from eyas.plan.digests import Plan
from eyas.plan.forecast import problem

STARTS_SERVERS = ("tune", "sweep")
"""Steps that start servers themselves; bench.max_loads says how many together."""


@dataclass
class Load:
    """One start of a service."""

    service: str
    steps: list[str]
    """What leases it while it is up, in order."""


def loads(plan: Plan, needed: set[str]) -> list[Load]:
    """The loads that the steps `needed` take, in order, by the executor's own rule: a service stays up for a step that
    waits for it as long as nothing that is to run before that step leases another service."""
    asked = problem(plan, {}, {})
    coming = {planned.name: planned for planned in plan.steps if planned.name in needed}
    found: list[Load] = []
    up: dict[str, Load] = {}
    for planned in list(coming.values()):
        for service in planned.step.leases:
            if service not in up:
                up[service] = Load(service, [])
                found.append(up[service])
            up[service].steps.append(planned.name)
        del coming[planned.name]
        for service in list(up):
            waiting = [name for name in asked.leasing[service] if name in coming]
            if not any(asked.comes_next(name, service, coming) for name in waiting):
                del up[service]
    return found


def of_their_own(plan: Plan, needed: set[str]) -> tuple[list[str], int]:
    """The steps that start servers by themselves, and how many they may load at most, all together."""
    found = [planned for planned in plan.steps if planned.name in STARTS_SERVERS and planned.name in needed]
    most = max((int(planned.config["bench"]["max_loads"]) for planned in found), default=0)
    return [planned.name for planned in found], most
