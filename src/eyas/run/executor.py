"""The executor: does what the schedule says, follows it, and stops cleanly.

One thread, one loop: look at the running children, take in what they said, start what may start, sleep a tenth of a
second. Children run detached, so the loop may die at any moment; the next runner finds out what became of them.
"""

import signal
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from eyas.errors import UserError
from eyas.files import number, write_json
from eyas.plan import schedule
from eyas.plan.digests import Plan
from eyas.plan.forecast import problem
from eyas.plan.schedule import Order, State
from eyas.run import outputs, process
from eyas.run.expected import Expected, size
from eyas.run.faults import IN_A_RUN, about_memory
from eyas.run.folder import RunFolder
from eyas.run.journal import Journal
from eyas.run.outlook import Outlook
from eyas.run.protocol import Follower, printable
from eyas.run.service import SERVICE_DIED, Service, spec
from eyas.run.view import View, Watcher

TICK_SECONDS = 0.1
FINISHED, FAULT, USER_ERROR, STOPPED = 0, 1, 2, 130


class Executor:
    """Brings one plan to its end in one run folder, which the caller has locked."""

    def __init__(
        self, run: RunFolder, plan: Plan, journal: Journal, watcher: Watcher, expected: Expected, hold: float = 0.0
    ) -> None:
        """`hold`: seconds for which a healthy service outlives the failure of a step that leases it."""
        self.run_folder, self.plan, self.journal, self.watcher = run, plan, journal, watcher
        self.expected, self.hold = expected, hold
        self.planned = {planned.name: planned for planned in plan.steps}
        self.views = {planned.name: View(planned.name, run.step(planned)) for planned in plan.steps}
        self.services = {planned.name: Service(run, plan, planned) for planned in plan.services}
        self.running: dict[str, tuple[process.Child, Follower]] = {}
        self.loads: list[tuple[str, float, float]] = []
        """Each load of a service that this runner began: from when to when, in unix time."""
        self.problem = problem(plan, {}, {})
        self.outlook = Outlook(self.views, {name: service.view for name, service in self.services.items()}, expected)
        self.code = FINISHED
        self.handed_over = False
        """Whether the next runner has taken the services that were held."""
        self._stop, self._drain, self._said = 0, False, False
        self._seen: tuple[State, Order] | None = None
        self._may_start: tuple[list[str], list[str]] = ([], [])

    def run(self, holding: Callable[[bool], None] = lambda now: None) -> int:
        """Run everything; returns the exit code: 0, 1 a fault, 2 a UserError, 130 stopped by a signal.

        SIGINT lets what runs finish and starts nothing more; a second one, or SIGTERM, stops it.
        Whatever ends it, no child is left running, save by SIGKILL or SIGHUP: then the next runner takes them over.
        `holding` is told when a service is held for the next runner, who may ask for it by SIGUSR1.
        """
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
        handlers = {number: signal.signal(number, self._on_signal) for number in numbers}
        self.watcher.begin(list(self.views.values()), [service.view for service in self.services.values()])
        try:
            self._take_over()
            self._look_ahead()
            while not self._stop:
                self._collect()
                if not self._advance() and not self.running:
                    break
                self._look_ahead()
                self.watcher.tick()
                time.sleep(TICK_SECONDS)
            code = STOPPED if self._stop or self._drain else self.code
            if code in (FAULT, USER_ERROR):
                self._hold_services(holding)
            return code
        finally:
            self._end_children()
            self.watcher.end()
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGUSR1:
            self.handed_over = True
        elif number == signal.SIGINT and not self._drain:
            self._drain = True
        else:
            self._stop = number

    def _take_over(self) -> None:
        """Find out what earlier runners left: finished outputs, running steps, steps that nobody wants any more."""
        for old in self.run_folder.unwanted(self.plan):
            if child := process.attach(old.path):
                self.watcher.note(f"ending {old.path.parent.name} (process {child.who['pid']}): the run has changed")
                process.end([child])
        for service in self.services.values():
            service.attach()
        problems: dict[str, str] = {}
        sound: set[str] = set()
        for name in self.planned:
            view = self.views[name]
            if child := process.attach(view.folder.path):
                self._follow(name, child, self._follower(name))
                self._become(name, "running", f"process {child.who['pid']} goes on")
            elif view.folder.out.exists():
                if problem := outputs.verify(view.folder.out):
                    problems[name] = problem
                else:
                    sound.add(name)
                    view.folder.path.touch()
        needed = self.plan.needed(sound)
        for name, view in self.views.items():
            if name in self.running:
                continue
            if name in sound or name not in needed:
                if name in problems:
                    self.watcher.note(f"{view.folder.out}: {problems[name]}, but all that reads it is finished")
                view.reused, view.seconds = True, view.folder.seconds()
                self._become(name, "finished", "reused" if name in sound else "not needed")
            elif name in problems:
                self.watcher.note(f"{name} runs again: {view.folder.out}: {problems[name]}")
                outputs.remove(view.folder.path)

    def _advance(self) -> bool:
        """End, load and start what the schedule says; whether anything is still to come."""
        if self._drain:
            self._say_that_it_drains()
            return False
        for name in self.services:
            self._look_after(name)
        state = self._state()
        for name in schedule.idle(self.problem, state):
            if not self._is_held(name, state):
                self.services[name].end()
                del state.up[name]
        steps, loads = self._startable(state)
        for name in loads:
            self.journal.event(name, self.services[name].planned.digest, "loading")
            self.watcher.note(f"{name} is started")
            self._look_after(name, start=True)
        for name in steps:
            leases = self.planned[name].step.leases
            self._start(name, {self.planned[name].step.role(lease): self.services[lease].told for lease in leases})
        return bool(state.waiting(self.problem))

    def _startable(self, state: State) -> tuple[list[str], list[str]]:
        """What may start now; the same as a tenth of a second ago, unless something has changed."""
        order = self._order()
        if (state, order) != self._seen:
            self._seen, self._may_start = (state.copy(), order), schedule.startable(self.problem, state, order)
        return self._may_start

    def _say_that_it_drains(self) -> None:
        if self.running and not self._said:
            self._said = True
            self.watcher.note(
                f"finishing {' and '.join(self.running)}, no other step is started; Ctrl-C again stops them now, and "
                "what they did is kept"
            )

    def _state(self) -> State:
        """What the schedule needs to know."""
        state = State(
            {name for name, view in self.views.items() if view.state == "finished"},
            set(self.running),
            {name: bool(service.told) for name, service in self.services.items() if service.child},
        )
        for name in self.problem.order:
            if self.views[name].state == "failed" or self.problem.needs(name) & state.lost:
                state.lost.add(name)
        return state

    def _order(self) -> Order:
        return self.outlook.forecast.order if self.outlook.forecast else self.problem.remaining

    def _look_after(self, name: str, start: bool = False) -> None:
        """Take in what a service says; start it again if it died while no step was using it."""
        service = self.services[name]
        in_use = any(step in self.running for step in self.problem.leasing[name])
        if in_use or not (start or service.child):
            return
        loading = not service.told
        try:
            service.look_after()
        except UserError as error:
            for step in self.problem.leasing[name]:
                if step in self._state().waiting(self.problem):
                    self._fail(step, USER_ERROR, str(error))
            return
        if loading and service.told and service.seconds:
            self.journal.event(name, service.planned.digest, "ready")
            self.watcher.note(f"{name} is ready after {service.seconds:.1f} s")
            self.loads.append((name, time.time() - service.seconds, time.time()))
            self._note(self.expected.record(service.planned, service.seconds, True, progress=service.view.progress))
            self.outlook.stale()

    def _note(self, text: str | None) -> None:
        if text:
            self.watcher.note(text)

    def _start(self, name: str, services: dict[str, Any]) -> None:
        folder = self.views[name].folder
        folder.path.mkdir(parents=True, exist_ok=True)
        write_json(
            folder.path / "spec.json", {**spec(self.run_folder, self.plan, self.planned[name]), "services": services}
        )
        self.journal.event(name, self.planned[name].digest, "starting")
        follower = self._follower(name)
        self._follow(name, process.start(folder.path, name), follower)
        self._become(name, "running")

    def _follower(self, name: str) -> Follower:
        """Follows a step's progress from here on; what was said before is known, but no news."""
        follower = Follower(self.views[name].folder.path / "progress.jsonl")
        follower.read()
        return follower

    def _follow(self, name: str, child: process.Child, follower: Follower) -> None:
        view = self.views[name]
        view.progress, view.began = follower.state, number(child.who.get("started")) or time.time()
        self.running[name] = child, follower

    def _collect(self) -> None:
        """Take in what the children said, and how they ended."""
        for name, (child, follower) in list(self.running.items()):
            running = child.running()
            for line in follower.read():
                if "milestone" in line:
                    self.watcher.milestone(self.views[name], printable(str(line["milestone"])))
            if not running:
                del self.running[name]
                process.end([child])  # Nothing that it forked may outlive it.
                self._ended(name, child.exit())

    def _ended(self, name: str, ended: dict[str, Any]) -> None:
        view, code, error = self.views[name], ended["code"], ended.get("error")
        if code == 0 and not view.folder.finished:
            code, error = FAULT, "it said that it was finished, but there is no output"
        if code == SERVICE_DIED and self.planned[name].step.leases:
            try:
                lost = ", ".join(self.services[lease].lost(name) for lease in self.planned[name].step.leases)
                self.watcher.note(f"{name} lost a service ({lost}): both are started again")
                self._become(name, "waiting", f"lost a service ({lost})")
            except UserError as gone:
                self._fail(name, USER_ERROR, str(gone))
        elif code == 0:
            view.ended, view.seconds = time.time(), view.folder.seconds()
            took, there = _whole(view), view.folder
            self._note(self.expected.record(self.planned[name], took, True, size(there), view.progress))
            self._become(name, "finished")
        elif code in (USER_ERROR, process.KILLED):
            self._fail(name, USER_ERROR, str(error))
        else:
            last = view.folder.last_log_line()
            text = error if not last or last == error else f"{error}: {last}" if code < 0 else last
            if about_memory(last):  # From a library that ends the process by itself.
                self._fail(name, USER_ERROR, f"out of memory ({last}): {IN_A_RUN}")
                return
            self._fail(name, FAULT, f"{text}; log: {view.folder.path / 'log.txt'}")

    def _fail(self, name: str, code: int, error: str) -> None:
        view = self.views[name]
        view.ended, view.seconds, view.error = time.time(), view.folder.seconds(), error
        self.code = FAULT if FAULT in (code, self.code) else USER_ERROR
        if view.seconds:
            self._note(self.expected.record(self.planned[name], _whole(view), False))
        self._become(name, "failed", error)

    def _become(self, name: str, state: Any, detail: str = "") -> None:
        self.journal.event(name, self.planned[name].digest, state, detail)
        self.views[name].state = state
        self.outlook.stale()
        self.watcher.changed(self.views[name])

    def _look_ahead(self) -> None:
        """Say when the run will be done, whenever that may have changed."""
        if self.outlook.due():
            self.outlook.look(self._state())
            self.outlook.write(self.run_folder)
            if ahead := self.outlook.ahead():
                self.watcher.outlook(ahead)

    def _is_held(self, service: str, state: State) -> bool:
        """Whether a service that no step will lease stays up for a mended one, nothing to come being in its way."""
        return (
            self.hold > 0
            and state.up[service]
            and bool(state.lost.intersection(self.problem.leasing[service]))
            and not any(
                self.problem.excludes(self.problem.steps[name], service) for name in state.waiting(self.problem)
            )
        )

    def _hold_services(self, holding: Callable[[bool], None]) -> None:
        """Keep services up after a failure, until the time is over, a signal comes, or the next runner takes them."""
        held = {name: service for name, service in self.services.items() if service.child}
        until = time.time() + self.hold
        if not held:
            return
        names, clock = " and ".join(held), time.strftime("%H:%M", time.localtime(until))
        self.watcher.note(
            f"{names} stays up until {clock}: mend what failed and run the same command again, in another terminal, "
            "and it need not load again; Ctrl-C ends it now"
        )
        holding(True)
        try:
            while time.time() < until and not (self._stop or self._drain or self.handed_over):
                if not any(service.child and service.child.running() for service in held.values()):
                    return
                self.watcher.waits(f"{names} held, {max(0, int(until - time.time()))} s left")
                self.watcher.tick()
                time.sleep(TICK_SECONDS)
        finally:
            holding(False)

    def _end_children(self) -> None:
        children = [child for child, _ in self.running.values()]
        up = [] if self.handed_over else [service.child for service in self.services.values() if service.child]
        process.end([*children, *up])
        for name in self.running:
            view = self.views[name]
            view.ended, view.seconds = time.time(), view.folder.seconds()
            # The journal may be what failed; the folders tell as much.
            view.state = "stopped" if not view.folder.finished else "finished"
            self.watcher.changed(view)
        self.running.clear()


def _whole(view: View) -> float:
    """Seconds that a step took as its runner sees it: what it worked, and the start and end of its process."""
    attempt = number(view.folder.exit().get("seconds"))
    if attempt is None or view.began is None or view.ended is None:
        return view.seconds or 0.0
    return (view.seconds or 0.0) + max(0.0, view.ended - view.began - attempt)
