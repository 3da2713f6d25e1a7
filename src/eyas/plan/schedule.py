"""What starts next: longest remaining path first, under resource tokens. Pure: the executor and the simulator ask it.

Steps take shares of resources while they run; a service takes its own from the start of its load until it is ended, and
the steps that lease it use that share. A step that measures (`alone`) runs beside its own services only. A service is
loaded ahead of the step that will lease it, while what that step needs is still being made.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

EPSILON = 1e-9


@dataclass(frozen=True)
class Task:
    """A step, or the load of a service."""

    name: str
    seconds: float
    """How long it is going to take, as far as is known."""
    needs: frozenset[str] = frozenset()
    """Steps that must be finished before it starts; not those that its services need."""
    takes: Mapping[str, float] = field(default_factory=dict)
    """Amounts of resources, held while it runs (a service: while it is up)."""
    leases: frozenset[str] = frozenset()
    """Services that must be ready while it runs."""
    alone: bool = False
    """It measures time: nothing runs or loads beside it, and no service is up that it does not lease."""


@dataclass(frozen=True)
class Problem:
    """Steps and services that are still to come or already there, and how much there is of each resource."""

    steps: Mapping[str, Task]
    services: Mapping[str, Task] = field(default_factory=dict)
    capacity: Mapping[str, float] = field(default_factory=dict)
    """Of each resource; 1 where it is not named."""

    def needs(self, step: str) -> frozenset[str]:
        """Steps that must be finished before this one can start: its own needs and those of its services."""
        return self._needs[step]

    @cached_property
    def _needs(self) -> dict[str, frozenset[str]]:
        return {
            name: task.needs.union(*(self.services[lease].needs for lease in task.leases))
            for name, task in self.steps.items()
        }

    @cached_property
    def before(self) -> dict[str, frozenset[str]]:
        """All steps that must be finished before each one can start."""
        found: dict[str, frozenset[str]] = {}
        for name in self.order:
            needs = self.needs(name)
            found[name] = needs.union(*(found[need] for need in needs))
        return found

    @cached_property
    def order(self) -> tuple[str, ...]:
        """The steps, each after what it needs."""
        placed: dict[str, None] = {}
        while len(placed) < len(self.steps):
            ready = [name for name in self.steps if name not in placed and self.needs(name) <= placed.keys()]
            assert ready, f"needs that are no steps, or a circle, among {sorted(self.steps.keys() - placed.keys())}"
            placed |= dict.fromkeys(ready)
        return tuple(placed)

    @cached_property
    def leasing(self) -> dict[str, tuple[str, ...]]:
        """The steps that lease each service."""
        return {
            service: tuple(name for name, task in self.steps.items() if service in task.leases)
            for service in self.services
        }

    @cached_property
    def apart(self) -> dict[str, frozenset[str]]:
        """For each service those that are never up beside it: a step that measures leases one without the other."""
        alone = [task.leases for task in self.steps.values() if task.alone and task.leases]
        return {
            one: frozenset(other for other in self.services if any((one in both) != (other in both) for both in alone))
            for one in self.services
        }

    @cached_property
    def remaining(self) -> "Order":
        """Seconds of the longest path from the start of each step, or of each service's load, to the end of all."""
        steps: dict[str, float] = {}
        services: dict[str, float] = {}
        for name in reversed(self.order):
            after = [steps[other] for other in self.steps if name in self.steps[other].needs]
            after += [services[one] for one, load in self.services.items() if name in load.needs and one in services]
            steps[name] = self.steps[name].seconds + max(after, default=0.0)
            for one in self.steps[name].leases:
                services[one] = max(services.get(one, 0.0), self.services[one].seconds + steps[name])
        return Order(steps, services)

    def comes_next(self, step: str, service: str, unfinished: Iterable[str]) -> bool:
        """Whether a service may be up for a step that still waits: nothing that is to run before the step leases
        another one, takes what the service takes, or measures alone without it."""
        return self._between[step, service].isdisjoint(unfinished)

    @cached_property
    def _between(self) -> dict[tuple[str, str], frozenset[str]]:
        """For each step and service that it leases: the steps before it during which the service cannot be up."""
        return {
            (step, service): frozenset(name for name in self.before[step] if self.excludes(self.steps[name], service))
            for service, leasing in self.leasing.items()
            for step in leasing
        }

    def excludes(self, task: Task, service: str) -> bool:
        """Whether a step cannot run while a service is up."""
        if task.leases - {service} or (task.alone and service not in task.leases):
            return True
        return service not in task.leases and any(
            self.services[service].takes.get(name, 0) + amount > self.capacity.get(name, 1) + EPSILON
            for name, amount in task.takes.items()
        )


@dataclass(frozen=True)
class Order:
    """Who comes first: the higher number."""

    steps: Mapping[str, float]
    services: Mapping[str, float]
    patient: bool = False
    """Load ahead of a step only what nobody else waits for."""
    after: frozenset[tuple[str, str]] = frozenset()
    """Steps, and loads (`load SERVICE`), that are held back until a step has finished whose way they would be in."""

    def holds_back(self, name: str, state: "State") -> bool:
        """Whether a step or load is to wait, though it could start."""
        return any(first == name and other not in state.finished | state.lost for first, other in self.after)


@dataclass
class State:
    """How far a run is."""

    finished: set[str] = field(default_factory=set)
    running: set[str] = field(default_factory=set)
    up: dict[str, bool] = field(default_factory=dict)
    """Services that load (False) or are ready (True)."""
    lost: set[str] = field(default_factory=set)
    """Steps that will not run: failed, or behind one that did."""

    def waiting(self, problem: Problem) -> list[str]:
        """Steps that are still to start."""
        gone = self.finished | self.running | self.lost
        return [name for name in problem.steps if name not in gone]

    def copy(self) -> "State":
        """The same, to go on from."""
        return State(set(self.finished), set(self.running), dict(self.up), set(self.lost))


def idle(problem: Problem, state: State) -> list[str]:
    """Services that are up without a step that leases them now or comes next."""
    waiting = state.waiting(problem)
    unfinished = problem.steps.keys() - state.finished
    return [
        service
        for service in state.up
        if not any(
            step in state.running or (step in waiting and problem.comes_next(step, service, unfinished))
            for step in problem.leasing[service]
        )
    ]


def startable(problem: Problem, state: State, order: Order) -> tuple[list[str], list[str]]:
    """The steps to start now, and the services to load, in the order given; `state` is not changed.

    Where holding something back would leave everything waiting for good, nothing is held back.
    """
    found = _startable(problem, state, order)
    if order.after and not any(found) and not state.running and all(state.up.values()):
        return _startable(problem, state, replace(order, after=frozenset()))
    return found


def _startable(problem: Problem, state: State, order: Order) -> tuple[list[str], list[str]]:
    state = state.copy()
    steps: list[str] = []
    services: list[str] = []
    may_run = [name for name in state.waiting(problem) if problem.needs(name) <= state.finished]
    may_load = [name for name in problem.services if name not in state.up and _wanted(problem, state, name)]
    ranked = [(order.steps[name], name, "") for name in may_run if not order.holds_back(name, state)]
    ranked += [
        (order.services.get(name, 0.0), "", name) for name in may_load if not order.holds_back(f"load {name}", state)
    ]
    for _, step, service in sorted(ranked, key=lambda item: -item[0]):
        if step and fits(problem, state, step):
            state.running.add(step)
            steps.append(step)
        elif service and loads(problem, state, service):
            ahead = not any(name in may_run for name in problem.leasing[service])
            if order.patient and ahead and _others_wait(problem, state, may_run, service):
                continue
            state.up[service] = False
            services.append(service)
    return steps, services


def _wanted(problem: Problem, state: State, service: str) -> bool:
    """Whether a service can load, and some step that is to come leases it next."""
    if not problem.services[service].needs <= state.finished:
        return False
    unfinished = problem.steps.keys() - state.finished
    gone = state.finished | state.running | state.lost
    return any(step not in gone and problem.comes_next(step, service, unfinished) for step in problem.leasing[service])


def _others_wait(problem: Problem, state: State, may_run: list[str], service: str) -> bool:
    """Whether a step that could start now could not beside the service."""
    beside = state.copy()
    beside.up[service] = False
    return any(
        fits(problem, state, name) and not fits(problem, beside, name) for name in may_run if name not in state.running
    )


def fits(problem: Problem, state: State, step: str) -> bool:
    """Whether a step that waits can start now."""
    task = problem.steps[step]
    if not problem.needs(step) <= state.finished or not all(state.up.get(name) for name in task.leases):
        return False
    if any(problem.steps[name].alone for name in state.running):
        return False
    if task.alone and (state.running or not state.up.keys() <= task.leases):
        return False
    return _room(problem, state, _own(problem, task))


def loads(problem: Problem, state: State, service: str) -> bool:
    """Whether a service that is not up can begin to load now."""
    task = problem.services[service]
    if not task.needs <= state.finished or any(problem.steps[name].alone for name in state.running):
        return False
    return not problem.apart[service].intersection(state.up) and _room(problem, state, task.takes)


def _own(problem: Problem, task: Task) -> dict[str, float]:
    """What a step takes beside what its services hold for it."""
    held = {name for lease in task.leases for name in problem.services[lease].takes}
    return {name: amount for name, amount in task.takes.items() if name not in held}


def _room(problem: Problem, state: State, wanted: Mapping[str, float]) -> bool:
    taken: dict[str, float] = {}
    held = [problem.services[name].takes for name in state.up]
    held += [_own(problem, problem.steps[name]) for name in state.running]
    for share in held:
        for name, amount in share.items():
            taken[name] = taken.get(name, 0.0) + amount
    return all(
        taken.get(name, 0.0) + amount <= problem.capacity.get(name, 1) + EPSILON for name, amount in wanted.items()
    )
