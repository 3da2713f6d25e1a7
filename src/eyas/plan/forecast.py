"""When a run will be done: its graph with learned durations, simulated, and what of it is certain.

The range comes from simulating the run with durations drawn from their distributions. What slows one step of a run
often slows its others, so a part of what is drawn is common to a whole run.
"""

import math
import random
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from eyas.plan import simulate
from eyas.plan.digests import Plan, Planned
from eyas.plan.durations import Estimate
from eyas.plan.schedule import Order, Problem, State, Task
from eyas.plan.simulate import Begun, Simulated

DRAWS, LOW, HIGH = 200, 0.05, 0.95
COMMON = 0.3
"""Share of the variance of a logarithm that all steps of a run have in common."""
BELIEVED = 0.02
"""From this share of its work on, what a step's own progress says of its end is taken into account."""


@dataclass(frozen=True)
class Running:
    """How far something is that runs."""

    elapsed: float
    share: float | None = None
    """Of its work that is finished."""


@dataclass(frozen=True)
class Forecast:
    """What is to come, from now."""

    problem: Problem
    order: Order
    run: Simulated
    """With median durations."""
    low: float
    high: float
    """Seconds until the end: 90 % of runs lie between."""
    guess: bool
    """Whether a duration that matters comes from too little history."""
    chain: list[str]
    """The critical path: steps, and loads as `load SERVICE`."""

    @property
    def seconds(self) -> float:
        """Seconds until the end."""
        return self.run.seconds

    @property
    def alone(self) -> float:
        """Seconds if everything ran by itself, one thing after another."""
        return simulate.one_after_another(self.problem)


def problem(plan: Plan, steps: Mapping[str, Estimate], services: Mapping[str, Estimate]) -> Problem:
    """The plan for the scheduler; what has no estimate (since it is finished) takes no time."""

    def task(planned: Planned, estimate: Estimate | None) -> Task:
        step = planned.step
        seconds = estimate.seconds if estimate else 0.0
        takes = dict.fromkeys(step.resources, 1.0)
        return Task(step.name, seconds, frozenset(step.needs), takes, frozenset(step.leases), step.alone)

    return Problem(
        {planned.name: task(planned, steps.get(planned.name)) for planned in plan.steps},
        {planned.name: task(planned, services.get(planned.name)) for planned in plan.services},
    )


def refined(estimate: Estimate, running: Running) -> Estimate:
    """The whole length of something that runs, from what was expected and how far it is.

    Both are log-normal and weighed by how much they vary; progress says little at first and nearly all at the end.
    """
    share = running.share
    if share is None or share < BELIEVED or running.elapsed <= 0 or estimate.seconds <= 0:
        return estimate
    told, doubt = math.log(running.elapsed / min(share, 1.0)), max(0.02, 0.5 * (1 - share) / math.sqrt(share))
    prior = 1 / max(estimate.spread, 0.02) ** 2
    weight = 1 / doubt**2
    middle = (prior * math.log(estimate.seconds) + weight * told) / (prior + weight)
    return replace(estimate, seconds=math.exp(middle), spread=1 / math.sqrt(prior + weight))


def make(
    plan: Plan,
    steps: Mapping[str, Estimate],
    services: Mapping[str, Estimate],
    state: State,
    running: Mapping[str, Running],
    loading: Mapping[str, Running],
    draws: int = DRAWS,
) -> Forecast:
    """Simulate what is left from a state, with median durations and with `draws` others.

    `running` and `loading` tell how far the running steps and loading services of `state` are.
    """
    asked = problem(plan, steps, services)
    known = {name: refined(steps[name], how) for name, how in running.items()}
    known_loads = {name: refined(services[name], how) for name, how in loading.items()}

    def begun(at: Callable[[str], float]) -> Begun:
        left = {name: known[name].at(at(name), how.elapsed) - how.elapsed for name, how in running.items()}
        load = {
            name: known_loads[name].at(at(f"load {name}"), how.elapsed) - how.elapsed for name, how in loading.items()
        }
        return Begun(state, left, load)

    now = begun(lambda name: 0.5)
    order = simulate.best_order(asked, now)
    run = simulate.simulate(asked, order, now)
    waiting = state.waiting(asked)
    leased = {lease for name in waiting for lease in asked.steps[name].leases}
    dice, normal, ends = random.Random(0), statistics.NormalDist(), []
    for _ in range(draws):
        common = dice.gauss(0, 1)
        share: dict[str, float] = {}

        def at(name: str, common: float = common, share: dict[str, float] = share) -> float:
            if name not in share:
                z = math.sqrt(COMMON) * common + math.sqrt(1 - COMMON) * dice.gauss(0, 1)
                share[name] = normal.cdf(z)
            return share[name]

        ends.append(
            simulate.simulate(
                asked,
                order,
                begun(at),
                {name: steps[name].at(at(name)) for name in waiting},
                {name: services[name].at(at(f"load {name}")) for name in leased},
            ).seconds
        )
    ends.sort()
    low, high = (ends[round(share * (len(ends) - 1))] for share in (LOW, HIGH)) if ends else (run.seconds, run.seconds)
    matter = [steps[name] for name in (*waiting, *running)] + [services[name] for name in leased]
    guess = any(estimate.guess and estimate.seconds > 0.02 * run.seconds for estimate in matter)
    return Forecast(asked, order, run, low, high, guess, simulate.critical(asked, run))
