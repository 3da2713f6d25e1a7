"""`eyas watch`: a run seen from outside, from its folder alone; while it goes on, or later."""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from eyas.errors import UserError
from eyas.files import number, read_json
from eyas.run import lock, process
from eyas.run.folder import RunFolder, StepFolder, read_or_empty
from eyas.run.protocol import Follower, printable
from eyas.run.view import Ahead, State, View, Watcher

LOOK_SECONDS = 0.25


class Onlooker:
    """The views of a run's steps and services, brought up to date from its folder."""

    def __init__(self, folder: Path) -> None:
        """Raises UserError: no run folder."""
        self.run = RunFolder(folder)
        self.steps = [View(name, step) for name, step in self.run.steps().items()]
        self.services = [View(name, StepFolder(path)) for name, path in _services(self.run)]
        self._followers = {id(view): Follower(view.folder.path / "progress.jsonl") for view in self._all()}
        self._owner = lock.owner(folder)

    def _all(self) -> Iterator[View]:
        yield from self.steps
        yield from self.services

    @property
    def goes_on(self) -> bool:
        """Whether its runner lives."""
        return process.alive(self._owner)

    def look(self) -> tuple[list[View], list[tuple[View, str]], Ahead | None]:
        """Steps whose state changed, milestones since the last look, and what the runner expects."""
        said = read_or_empty(self.run.forecast)
        first, now = _spans(said.get("first")), _spans(said.get("now"))
        began = number(said.get("began")) or 0.0
        chain = ahead.chain if (ahead := read_ahead(said)) else []
        changed, milestones = [], []
        for view in self._all():
            service = view in self.services
            follower = self._followers[id(view)]
            lines = follower.read()
            view.progress = follower.state
            milestones += [(view, printable(str(line["milestone"]))) for line in lines if "milestone" in line]
            name = f"load {view.name}" if service else view.name
            view.planned, view.coming = first.get(name), now.get(name)
            view.critical = name in chain
            before, view.state = view.state, (_service_state if service else step_state)(view.folder)
            view.began = number(process.who_runs(view.folder.path).get("started"))
            view.seconds = None if service else view.folder.seconds()
            view.ended = _ended(view, service)
            view.reused = view.state == "finished" and (view.ended or 0) < began
            view.error = str(view.folder.exit().get("error")) if view.state == "failed" else None
            if view.state != before and not service:
                changed.append(view)
        return changed, milestones, ahead if self.goes_on else None


def watch(folder: Path, watcher: Watcher) -> None:
    """Show a run until its runner ends; once, if none runs. Raises UserError: no run folder."""
    seen = Onlooker(folder)
    seen.look()
    watcher.begin(seen.steps, seen.services)
    try:
        if not seen.goes_on:
            for view in seen.steps:
                watcher.changed(view)
        while True:
            goes_on = seen.goes_on
            changed, milestones, ahead = seen.look()
            for view in changed:
                watcher.changed(view)
            for view, text in milestones:
                watcher.milestone(view, text)
            if ahead:
                watcher.outlook(ahead)
            if lock.owner(folder).get("holding"):
                watcher.waits("the runner holds a server for a mended run")
            watcher.tick()
            if not goes_on:
                return
            time.sleep(LOOK_SECONDS)
    except KeyboardInterrupt:
        return
    finally:
        watcher.end()


def read_ahead(said: dict[str, Any]) -> Ahead | None:
    """What forecast.json says of the end of the run; None where it says nothing that can be read."""
    now = said.get("now")
    with contextlib.suppress(KeyError, TypeError, ValueError):
        if isinstance(now, dict):
            end, low, high = (float(now[key]) for key in ("end", "low", "high"))
            return Ahead(end, low, high, bool(now["guess"]), [str(name) for name in now["critical"]])
    return None


def _spans(said: Any) -> dict[str, tuple[float, float]]:
    """From when to when each step and load (`load SERVICE`) was going to run."""
    found: dict[str, tuple[float, float]] = {}
    with contextlib.suppress(KeyError, TypeError, ValueError, AttributeError):
        for name, span in said["steps"].items():
            found[name] = float(span["start"]), float(span["end"])
        for span in said["loads"]:
            found.setdefault(f"load {span['service']}", (float(span["start"]), float(span["end"])))
    return found


def _services(run: RunFolder) -> list[tuple[str, Path]]:
    with contextlib.suppress(OSError, UserError, KeyError, TypeError):
        services = read_json(run.path / "plan.json")["services"]
        return [(one["name"], run.path / "services" / one["name"] / one["digest"]) for one in services]
    return []


def step_state(step: StepFolder) -> State:
    """How far a step is, from its folder."""
    if step.running:
        return "running"
    if step.finished:
        return "finished"
    if step.exit().get("code"):
        return "failed"
    return "stopped" if process.who_runs(step.path) else "waiting"


def _service_state(service: StepFolder) -> State:
    if service.running:
        return "finished" if (service.path / "ready.json").exists() else "running"
    return "waiting"


def _ended(view: View, service: bool) -> float | None:
    if view.state in ("running", "waiting"):
        return None
    if service:
        with contextlib.suppress(OSError):
            return (view.folder.path / "ready.json").stat().st_mtime
    ended = number(view.folder.exit().get("ended"))
    return ended if ended is not None or view.began is None else view.began + (view.seconds or 0.0)
