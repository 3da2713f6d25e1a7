"""The same scheduler on a virtual clock: for `eyas plan`, for estimates while a run goes on, and for tests."""

import heapq
import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from eyas.plan import schedule
from eyas.plan.schedule import Order, Problem, State

TRIES, SWAY = 24, 0.35
"""Other orders that are tried beside the longest remaining path, and how much each length is varied for them."""


@dataclass
class Span:
    """From start to end, in seconds on the virtual clock."""

    start: float
    end: float


@dataclass
class Simulated:
    """How a run goes."""

    seconds: float
    steps: dict[str, Span] = field(default_factory=dict)
    loads: list[tuple[str, Span]] = field(default_factory=list)
    """Each load of a service, from its start until it is ready, in order of their starts."""
    ended: list[tuple[str, Span]] = field(default_factory=list)
    """Each service that was ended, from the start of its load to its end."""


@dataclass
class Begun:
    """What is under way at second 0: seconds left of running steps and of services that still load."""

    state: State = field(default_factory=State)
    steps: Mapping[str, float] = field(default_factory=dict)
    loads: Mapping[str, float] = field(default_factory=dict)


def simulate(
    problem: Problem,
    order: Order,
    begun: Begun | None = None,
    steps: Mapping[str, float] | None = None,
    loads: Mapping[str, float] | None = None,
    limit: float = float("inf"),
) -> Simulated:
    """Run a problem. `steps` and `loads` are the seconds that things really take, in place of those expected.

    Given up once `limit` is passed: then `seconds` is infinite. Asserts that everything that is not lost ran.
    """
    begun = begun or Begun()
    state = begun.state.copy()
    told = Simulated(0.0)
    events: list[tuple[float, str, str]] = []
    up_since: dict[str, float] = dict.fromkeys(state.up, 0.0)
    now = 0.0

    def begin(kind: str, name: str, seconds: float) -> None:
        heapq.heappush(events, (now + seconds, kind, name))
        span = Span(now, now + seconds)
        if kind == "step":
            told.steps[name] = span
        else:
            told.loads.append((name, span))

    for name, left in begun.steps.items():
        begin("step", name, left)
    for name, left in begun.loads.items():
        begin("load", name, left)
    while True:
        for name in schedule.idle(problem, state):
            told.ended.append((name, Span(up_since.pop(name), now)))
            if not state.up.pop(name):  # Ended while it loads: what comes of the load is of no interest any more.
                events = [event for event in events if event[1:] != ("load", name)]
                heapq.heapify(events)
        starting, loading = schedule.startable(problem, state, order)
        for name in starting:
            state.running.add(name)
            begin("step", name, (steps or {}).get(name, problem.steps[name].seconds))
        for name in loading:
            state.up[name], up_since[name] = False, now
            begin("load", name, (loads or {}).get(name, problem.services[name].seconds))
        if not events:
            break
        now, kind, name = heapq.heappop(events)
        if now >= limit:
            return Simulated(float("inf"))
        if kind == "step":
            state.running.remove(name)
            state.finished.add(name)
        else:
            state.up[name] = True
        while events and events[0][0] <= now + schedule.EPSILON:
            _, kind, name = heapq.heappop(events)
            if kind == "step":
                state.running.remove(name)
                state.finished.add(name)
            else:
                state.up[name] = True
    assert not state.waiting(problem), f"nothing runs, and these cannot start: {state.waiting(problem)}"
    told.seconds = max((span.end for span in told.steps.values()), default=0.0)
    return told


def best_order(problem: Problem, begun: Begun | None = None, tries: int = TRIES) -> Order:
    """The order to go by: the longest remaining path first, unless another one is faster on the virtual clock.

    A list that is always worked off greedily has its bad cases. Tried are a few variations of it, and then, one by one,
    what may be held back because something more urgent waits for what it takes.
    """
    plain = problem.remaining
    dice = random.Random(0)
    best, run = plain, simulate(problem, plain, begun)
    bound = _bound(problem, begun or Begun()) * (1 + 1e-6)
    others = varied = [replace(plain, patient=True), *(_varied(plain, dice, n % 2 == 1) for n in range(tries))]
    while run.seconds > bound and others:
        before = run.seconds
        for other in others:
            found = simulate(problem, other, begun, limit=run.seconds)
            if found.seconds < run.seconds - schedule.EPSILON:
                best, run = other, found
        if others is not varied and run.seconds == before:
            break
        others = [replace(best, after=best.after | {pair}) for pair in _in_the_way(problem, run) - best.after]
    return best


def _in_the_way(problem: Problem, run: Simulated) -> frozenset[tuple[str, str]]:
    """Pairs of a step or load, and a step that waited for nothing but room while it ran."""
    everything = [*run.steps.items(), *((f"load {name}", span) for name, span in run.loads)]
    pairs = set()
    for name, own in run.steps.items():
        task = problem.steps[name]
        ready = max((run.steps[need].end for need in task.needs if need in run.steps), default=0.0)
        theirs = problem.before[name] | {name, *(f"load {lease}" for lease in task.leases)}
        pairs |= {
            (other, name)
            for other, span in everything
            if span.start < own.start and span.end > ready + schedule.EPSILON and other not in theirs
        }
    return frozenset(pair for pair in pairs if pair[1] not in problem.before.get(pair[0], ()))


def _varied(order: Order, dice: random.Random, patient: bool) -> Order:
    def vary(ranks: Mapping[str, float]) -> dict[str, float]:
        return {name: rank * dice.uniform(1 - SWAY, 1 + SWAY) for name, rank in ranks.items()}

    return Order(vary(order.steps), vary(order.services), patient)


def _bound(problem: Problem, begun: Begun) -> float:
    """No order takes fewer seconds than the longest path that is left."""
    left = [problem.remaining.steps[name] for name in begun.state.waiting(problem)]
    return max([*left, *begun.steps.values()], default=0.0)


def one_after_another(problem: Problem) -> float:
    """Seconds when every step, and every load that it waits for, runs by itself: what scripts with `wait` do."""
    state, seconds = State(), 0.0
    for name in problem.order:
        for service in sorted(problem.steps[name].leases - state.up.keys()):
            seconds += problem.services[service].seconds
            state.up[service] = True
        seconds += problem.steps[name].seconds
        state.finished.add(name)
        for service in schedule.idle(problem, state):
            del state.up[service]
    return seconds


def critical(problem: Problem, run: Simulated) -> list[str]:
    """The chain of steps and loads (`load SERVICE`) that decides when a simulated run ends, first to last.

    Each link is what ended last of all that the next one waited for, whether it needs it or its resources.
    """
    everything = [
        (span, name, problem.steps[name].needs, problem.steps[name].leases) for name, span in run.steps.items()
    ]
    everything += [(span, f"load {name}", problem.services[name].needs, frozenset()) for name, span in run.loads]
    chain: list[str] = []
    current = max(everything, key=lambda item: item[0].end, default=None)
    while current is not None:
        span, name, needs, leases = current
        chain.append(name)
        wanted = set(needs) | {f"load {lease}" for lease in leases}
        earlier = [item for item in everything if abs(item[0].end - span.start) < 1e-6 and item[1] not in chain]
        current = max(earlier, key=lambda item: (item[1] in wanted, item[0].start), default=None) if earlier else None
    return chain[::-1]
