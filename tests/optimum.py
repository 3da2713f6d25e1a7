"""The least seconds that a small problem can take, by trying every choice that may matter (branch and bound).

Some schedule in which each start falls on an end of something else (or on second 0) is a fastest one; so at every end,
each set of starts that fit is tried, the empty one too. What may start, load and end is up to `eyas.plan.schedule`.
"""

from eyas.plan import schedule
from eyas.plan.schedule import Problem, State


def optimum(problem: Problem, known: float, nodes: int = 2_000_000) -> float:
    """Seconds of a fastest schedule, given one that takes `known`. Raises RuntimeError beyond `nodes` states."""
    tail = problem.remaining.steps
    ahead = problem.remaining.services
    best = known
    seen: dict[tuple[object, ...], list[tuple[float, ...]]] = {}
    left = nodes

    def bound(now: float, state: State, events: dict[tuple[str, str], float]) -> float:
        until = [now + tail[name] for name in state.waiting(problem)]
        for (kind, name), end in events.items():
            follow = 0.0
            if kind == "step":
                follow = tail[name] - problem.steps[name].seconds
            until.append(end + follow)
        for service in problem.services:
            if service not in state.up and any(n in state.waiting(problem) for n in problem.leasing[service]):
                until.append(now + ahead[service])
        return max(until, default=now)

    def visit(now: float, state: State, events: dict[tuple[str, str], float]) -> None:
        nonlocal best, left
        left -= 1
        if left < 0:
            raise RuntimeError("too large for an exact answer")
        for name in schedule.idle(problem, state):
            del state.up[name]
            events.pop(("load", name), None)
        if not state.waiting(problem) and not state.running:
            best = min(best, now)
            return
        if bound(now, state, events) >= best - 1e-9:
            return
        key = (frozenset(state.finished), frozenset(state.running), frozenset(state.up.items()))
        ends = tuple(events[event] for event in sorted(events))
        known_here = seen.setdefault(key, [])
        if any(all(a <= b + 1e-9 for a, b in zip((*other,), (now, *ends), strict=True)) for other in known_here):
            return
        known_here.append((now, *ends))
        choose(now, state, events, 0)

    def choose(now: float, state: State, events: dict[tuple[str, str], float], first: int) -> None:
        """Try each set of starts at this moment; `first` keeps them in one order."""
        names = [("step", name) for name in problem.order] + [("load", name) for name in problem.services]
        for number in range(first, len(names)):
            kind, name = names[number]
            if kind == "step":
                if name not in state.waiting(problem) or not schedule.fits(problem, state, name):
                    continue
                seconds = problem.steps[name].seconds
            else:
                if name in state.up or not schedule.loads(problem, state, name) or not wanted(state, name):
                    continue
                seconds = problem.services[name].seconds
            after = state.copy()
            if kind == "step":
                after.running.add(name)
            else:
                after.up[name] = False
            choose(now, after, {**events, (kind, name): now + seconds}, number + 1)
        if events:
            later = min(events.values())
            after, rest = state.copy(), dict(events)
            for (kind, name), end in events.items():
                if end <= later + 1e-9:
                    del rest[kind, name]
                    if kind == "step":
                        after.running.remove(name)
                        after.finished.add(name)
                    else:
                        after.up[name] = True
            visit(later, after, rest)

    def wanted(state: State, service: str) -> bool:
        waiting = set(state.waiting(problem)).intersection(problem.leasing[service])
        unfinished = problem.steps.keys() - state.finished
        return any(problem.comes_next(step, service, unfinished) for step in waiting)

    visit(0.0, State(), {})
    return best
