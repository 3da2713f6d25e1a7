"""Services: programs that steps lease, such as a model server.

The runner starts a service ahead of the first step that leases it, and ends its process group after the last one.
A service that dies is started again, together with the step that noticed (exit code 75), at most three times.
"""

import time
from typing import Any

from eyas.errors import UserError
from eyas.files import number, write_json
from eyas.plan.digests import Plan, Planned
from eyas.run import process
from eyas.run.folder import RunFolder, StepFolder, read_or_empty
from eyas.run.protocol import Follower
from eyas.run.view import State, View

SERVICE_DIED = 75
RESTARTS = 3
LAST_WORDS_SECONDS = 8.0
"""How long a service that a step lost may take to say why: a server ends its processes first."""


class Service:
    """The lease of one service."""

    def __init__(self, run: RunFolder, plan: Plan, planned: Planned) -> None:
        self.name, self.planned = planned.name, planned
        self.folder = StepFolder(run.service(planned).path)
        self.view = View(planned.name, self.folder)
        self.child: process.Child | None = None
        self.told: dict[str, Any] | None = None
        """Its ready.json, once it answers."""
        self.seconds: float | None = None
        """Seconds that its load took, if this runner began it."""
        self.restarts = 0
        self._follower = Follower(self.folder.path / "progress.jsonl")
        self._spec = spec(run, plan, planned)

    def attach(self) -> None:
        """Take over the service if an earlier runner left it running."""
        self.child = process.attach(self.folder.path)
        if self.child:
            self._show("running")
            self._take_in()

    def look_after(self) -> None:
        """Start it, start it again if it died, and take in whether it answers.

        Raises UserError when it cannot be brought up.
        """
        if self.child is None:
            self._start()
        elif not self.child.running():
            self.count_restart(f"{self._ended(self.child)}; log: {self.folder.path / 'log.txt'}")
            self._start()
        self._take_in()

    def _take_in(self) -> None:
        """What it says, and whether it answers."""
        self._follower.read()
        self.view.progress = self._follower.state
        if self.told is None and (said := read_or_empty(self.folder.path / "ready.json")):
            self.told = said
            if self.child is not None and self.child.popen is not None and self.view.began is not None:
                self.seconds = max(0.0, (self.folder.path / "ready.json").stat().st_mtime - self.view.began)
            self.view.ended, self.view.state = time.time(), "finished"

    def lost(self, step: str) -> str:
        """End it, since a step lost it, and allow one more start; its name and what it says of its end.

        Raises UserError: its own one, which another start would not change, or this was the last start.
        """
        why, deadline = "", time.monotonic() + LAST_WORDS_SECONDS
        try:
            while self.child is not None and self.child.running() and time.monotonic() < deadline:
                time.sleep(0.05)
            if self.child is not None and not self.child.running():
                why = f": {self._ended(self.child)}"
        finally:
            self.end()
        self.count_restart(f"{step} lost it{why}; log: {self.folder.path / 'log.txt'}")
        return f"{self.name}{why}"

    def _ended(self, child: process.Child) -> str:
        """Take in how it ended. Raises UserError: by one of its own, which another start would not change."""
        ended = child.exit()
        process.end([child])
        self._gone()
        if ended["code"] == 2:
            raise UserError(f"service {self.name}: {ended['error']}")
        return str(ended["error"])

    def count_restart(self, why: str) -> None:
        """Allow one more restart. Raises UserError after the third."""
        if self.restarts == RESTARTS:
            raise UserError(f"service {self.name} died {RESTARTS + 1} times, at last: {why}")
        self.restarts += 1

    def end(self) -> None:
        """End its process group."""
        if self.child is not None:
            process.end([self.child])
        self._gone()

    def _gone(self) -> None:
        self.child = self.told = self.seconds = None
        self.view.state, self.view.ended = "waiting", None

    def _show(self, state: State) -> None:
        assert self.child is not None
        self.view.state, self.view.ended = state, None
        self.view.began = number(self.child.who.get("started")) or time.time()

    def _start(self) -> None:
        self.folder.path.mkdir(parents=True, exist_ok=True)
        (self.folder.path / "ready.json").unlink(missing_ok=True)
        write_json(self.folder.path / "spec.json", self._spec)
        self.child = process.start(self.folder.path, self.name, "--service")
        self._show("running")


def spec(run: RunFolder, plan: Plan, planned: Planned) -> dict[str, object]:
    """spec.json of a step or service, less its leases."""
    steps = {other.name: other for other in plan.steps}
    return {
        "step": planned.name,
        "entry": planned.step.entry,
        "digest": planned.digest,
        "code": planned.code,
        "seed": plan.seed,
        "config": planned.config,
        "outside": dict(planned.step.outside),
        "inputs": {planned.step.role(name): str(run.step(steps[name]).out.absolute()) for name in planned.step.needs},
        "services": {},
    }
