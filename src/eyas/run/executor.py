"""The executor: starts what is ready, follows it, and stops cleanly.

One thread, one loop: look at the running children, take in what they said, start what may start, sleep a tenth of a
second. Children run detached, so the loop may die at any moment; the next runner finds out what became of them.
"""

import signal
import time
from types import FrameType
from typing import Any

from eyas.errors import UserError
from eyas.files import number, write_json
from eyas.plan.digests import Plan, Planned
from eyas.run import outputs, process
from eyas.run.faults import IN_A_RUN, about_memory
from eyas.run.folder import RunFolder
from eyas.run.journal import Journal, expected
from eyas.run.protocol import Follower, printable
from eyas.run.service import SERVICE_DIED, Service, spec
from eyas.run.view import View, Watcher

TICK_SECONDS = 0.1
FINISHED, FAULT, USER_ERROR, STOPPED = 0, 1, 2, 130


class Executor:
    """Brings one plan to its end in one run folder, which the caller has locked."""

    def __init__(self, run: RunFolder, plan: Plan, journal: Journal, watcher: Watcher, machine: dict[str, str]) -> None:
        """`machine` says on what durations are measured: its `device` and `model`."""
        self.run_folder, self.plan, self.journal, self.watcher, self.machine = run, plan, journal, watcher, machine
        self.planned = {planned.name: planned for planned in plan.steps}
        self.views = {planned.name: View(planned.name, run.step(planned)) for planned in plan.steps}
        self.services = {planned.name: Service(run, plan, planned) for planned in plan.services}
        self.running: dict[str, tuple[process.Child, Follower]] = {}
        self.code = FINISHED
        self._stop = 0

    def run(self) -> int:
        """Run everything; returns the exit code: 0, 1 a fault, 2 a UserError, 130 stopped by a signal.

        Whatever ends it, no child is left running, save by SIGKILL or SIGHUP: then the next runner takes them over.
        """
        handlers = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        self.watcher.begin(list(self.views.values()))
        try:
            self._take_over()
            while not self._stop:
                self._collect()
                self._end_idle_services()
                if not self._start_ready() and not self.running:
                    break
                self.watcher.tick()
                time.sleep(TICK_SECONDS)
            return STOPPED if self._stop else self.code
        finally:
            self._end_children()
            self.watcher.end()
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
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
        for name, planned in self.planned.items():
            view = self.views[name]
            view.expected = expected(self.run_folder.journal, name, planned.step.work)
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

    def _start_ready(self) -> bool:
        """Start what may start; whether anything is still to come."""
        coming = False
        for name, planned in self.planned.items():
            if self.views[name].state != "waiting" or self._blocked(planned):
                continue
            coming = True
            if self._needs_are_finished(planned) and self._has_room(planned):
                try:
                    ready = {planned.step.role(lease): self.services[lease].ready() for lease in planned.step.leases}
                except UserError as error:
                    self._fail(name, USER_ERROR, str(error))
                    continue
                if all(ready.values()):
                    self._start(name, ready)
        return coming

    def _blocked(self, planned: Planned) -> bool:
        """Whether a step can never start, because one before it failed."""
        return any(
            self.views[need].state == "failed" or self._blocked(self.planned[need]) for need in self.plan.needs(planned)
        )

    def _needs_are_finished(self, planned: Planned) -> bool:
        return all(self.views[need].state == "finished" for need in self.plan.needs(planned))

    def _has_room(self, planned: Planned) -> bool:
        """Whether nothing stands in the way of a step; one that measures runs alone, beside its own services only."""
        beside = [self.planned[name].step for name in self.running]
        up = {service.name for service in self.services.values() if service.child}
        if planned.step.alone and (beside or not up <= set(planned.step.leases)):
            return False
        if any(step.alone for step in beside):
            return False
        return not set(planned.step.resources) & {resource for step in beside for resource in step.resources}

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
            self._measure(name, "done")
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
        self._measure(name, "failed")
        self._become(name, "failed", error)

    def _measure(self, name: str, outcome: str) -> None:
        view, planned = self.views[name], self.planned[name]
        device = str(view.folder.result().get("device") or self.machine.get("device", ""))
        amount, unit = view.progress.done, view.progress.unit
        model, seconds = self.machine.get("model", ""), view.seconds or 0.0
        self.journal.duration(name, device, model, planned.step.work, amount, unit, seconds, outcome)

    def _become(self, name: str, state: Any, detail: str = "") -> None:
        self.journal.event(name, self.planned[name].digest, state, detail)
        self.views[name].state = state
        self.watcher.changed(self.views[name])

    def _end_idle_services(self) -> None:
        """End services that no step leases, nor will before another service takes their place on the device."""
        for service in self.services.values():
            if service.child and not any(
                name in self.running or self._comes_next(planned, service.name)
                for name, planned in self.planned.items()
                if service.name in planned.step.leases
            ):
                service.end()

    def _comes_next(self, planned: Planned, service: str) -> bool:
        """Whether a step waits for this service, and nothing that is to run before it leases another one."""
        if self.views[planned.name].state != "waiting" or self._blocked(planned):
            return False
        unfinished = {name for name, view in self.views.items() if view.state != "finished"}
        return self.plan.comes_next(planned, service, unfinished)

    def _end_children(self) -> None:
        children = [child for child, _ in self.running.values()]
        process.end([*children, *(service.child for service in self.services.values() if service.child)])
        for name in self.running:
            view = self.views[name]
            view.ended, view.seconds = time.time(), view.folder.seconds()
            # The journal may be what failed; the folders tell as much.
            view.state = "stopped" if not view.folder.finished else "finished"
            self.watcher.changed(view)
        self.running.clear()
