"""Any problem comes to its end on the virtual clock, within its tokens, and close to the fastest way there is."""

import random
import statistics

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from eyas.plan import schedule
from eyas.plan.schedule import Problem, Task
from eyas.plan.simulate import Simulated, best_order, critical, one_after_another, simulate
from optimum import optimum

SHARES = ({}, {"gpu": 1.0}, {"gpu": 0.5}, {"cores": 0.5}, {"disk": 1.0}, {"gpu": 1.0, "cores": 0.5}, {"uplink": 0.3})


@st.composite
def problems(draw: st.DrawFn, most: int = 8) -> Problem:
    services = {
        name: Task(name, draw(st.integers(1, 9)), takes=draw(st.sampled_from([{"gpu": 1.0}, {"gpu": 0.5}, {}])))
        for name in ("server", "drafted")[: draw(st.integers(0, 2))]
    }
    steps: dict[str, Task] = {}
    for number in range(draw(st.integers(1, most))):
        needs = draw(st.sets(st.sampled_from(sorted(steps)), max_size=3)) if steps else set()
        lease = draw(st.sampled_from([None, None, *services])) if services else None
        leases = frozenset([lease] if lease else [])
        takes = {} if lease else draw(st.sampled_from(SHARES))
        seconds = draw(st.integers(1, 10))
        name = f"s{number}"
        steps[name] = Task(name, seconds, frozenset(needs), takes, leases, draw(st.integers(0, 9)) == 0)
    if services and draw(st.booleans()):  # A server that needs what a step makes.
        first = next(iter(services))
        needs = draw(st.sampled_from(sorted(steps)))
        free = all(first not in steps[name].leases for name in {needs, *_before(steps, needs)})
        assume(free)
        services[first] = Task(first, 3, frozenset([needs]), services[first].takes)
    return Problem(steps, services)


def _before(steps: dict[str, Task], name: str) -> set[str]:
    needs = steps[name].needs
    return needs.union(*(_before(steps, need) for need in needs))


def violations(problem: Problem, run: Simulated) -> list[str]:
    """What a simulated run did that it must not: found from its spans alone."""
    found = []
    up = run.ended
    for name, span in run.steps.items():
        task = problem.steps[name]
        found += [f"{name} before {need}" for need in problem.needs(name) if run.steps[need].end > span.start + 1e-9]
        for lease in task.leases:
            ready = [there for one, there in run.loads if one == lease and there.end <= span.start + 1e-9]
            kept = [there for one, there in up if one == lease and there.start <= span.start and there.end >= span.end]
            if not ready or not kept:
                found.append(f"{name} without {lease}")
        if task.alone:
            others = [other for other, there in run.steps.items() if other != name and _meet(span, there)]
            others += [one for one, there in up if one not in task.leases and _meet(span, there)]
            found += [f"{other} beside {name}" for other in others]
    for moment in [span.start for span in run.steps.values()] + [span.start for _, span in run.loads]:
        taken: dict[str, float] = {}
        held = [problem.services[one].takes for one, there in up if there.start <= moment < there.end - 1e-9]
        held += [problem.steps[n].takes for n, there in run.steps.items() if there.start <= moment < there.end - 1e-9]
        for share in held:
            for resource, amount in share.items():
                taken[resource] = taken.get(resource, 0) + amount
        found += [f"{amount} of {resource} at {moment}" for resource, amount in taken.items() if amount > 1 + 1e-9]
    return found


def _meet(one: object, other: object) -> bool:
    return one.start < other.end - 1e-9 and other.start < one.end - 1e-9  # type: ignore[attr-defined]


@settings(max_examples=80)
@given(problems(), st.randoms(use_true_random=False), st.booleans())
def test_needs_leases_and_tokens_are_never_violated(problem: Problem, dice: random.Random, patient: bool) -> None:
    """Whatever the order, and whatever things really take."""
    ranks = problem.remaining
    order = schedule.Order(
        {name: dice.random() for name in ranks.steps}, {name: dice.random() for name in ranks.services}, patient
    )
    really = {name: dice.uniform(0.1, 20) for name in problem.steps}
    run = simulate(problem, order, steps=really, loads={name: dice.uniform(0.1, 20) for name in problem.services})
    assert violations(problem, run) == []
    assert run.steps.keys() == problem.steps.keys()
    chain = critical(problem, run)
    assert chain[-1] in run.steps
    assert run.steps[chain[-1]].end == run.seconds


@settings(max_examples=30)
@given(problems())
def test_the_order_chosen_is_no_slower_than_the_longest_path_first(problem: Problem) -> None:
    plain = simulate(problem, problem.remaining)
    best = simulate(problem, best_order(problem))
    assert best.seconds <= plain.seconds + 1e-9
    assert violations(problem, best) == []
    assert best.seconds <= one_after_another(problem) + 1e-9


def test_on_average_within_a_tenth_of_the_optimum() -> None:
    ratios: list[float] = []

    @settings(max_examples=60, database=None)
    @given(problems(most=7))
    def compare(problem: Problem) -> None:
        found = simulate(problem, best_order(problem)).seconds
        best = optimum(problem, found)
        assert best <= found + 1e-9
        ratios.append(found / best)

    compare()
    assert len(ratios) >= 50
    assert statistics.mean(ratios) <= 1.1
