"""Runs toy steps, in this process or as a program: `python toyrun.py RUN_FOLDER CONFIG [SECONDS]`.

With SECONDS it runs the steps that lease a service, which outlives a failure for so long.
"""

import json
import sys
from pathlib import Path
from typing import Any

from eyas.plan.digests import Plan, make
from eyas.plan.forecast import Forecast
from eyas.plan.graph import Step
from eyas.run import session
from eyas.run.view import View

CHAIN = (
    Step("one", "toys:work", sections=("one",), resources=("cpu",)),
    Step("two", "toys:work", needs=("one",), sections=("two",), resources=("cpu",)),
    Step("side", "toys:work", sections=("side",)),
    Step("export", "toys:work", needs=("two",), sections=("export",), product=True),
)

WEB = (Step("web", "toys:serve", sections=("service",)),)
SERVED = (
    Step("asked", "toys:ask", sections=("asked",), leases=("web",)),
    Step("judged", "toys:work", needs=("asked",), sections=("judged",), leases=("web",)),
)


class Recorder:
    """A watcher that remembers."""

    def __init__(self) -> None:
        self.states: list[str] = []
        self.said: list[str] = []
        self.notes: list[str] = []
        self.looked: list[Forecast] = []

    def begin(self, views: list[View], services: list[View]) -> None:
        self.views = {view.name: view for view in views}

    def changed(self, view: View) -> None:
        self.states.append(f"{view.name} {'reused' if view.reused else view.state}")

    def milestone(self, view: View, text: str) -> None:
        self.said.append(f"{view.name}: {text}")

    def note(self, text: str) -> None:
        self.notes.append(text)

    def outlook(self, found: Forecast) -> None:
        self.looked.append(found)

    def waits(self, text: str) -> None: ...

    def tick(self) -> None: ...

    def end(self) -> None: ...

    def ran(self) -> list[str]:
        """Steps that were started, in order."""
        return [text.split()[0] for text in self.states if text.endswith(" running")]


def plan(
    config: dict[str, Any] | None = None, steps: tuple[Step, ...] = CHAIN, services: tuple[Step, ...] = ()
) -> Plan:
    """Plan of toy steps; `config` holds the options of `work` by step."""
    names = {name for step in (*steps, *services) for name in step.sections}
    return make(steps, {name: (config or {}).get(name, {}) for name in names}, 0, services)


def run(folder: Path, config: dict[str, Any] | None = None, hold: float = 0, **how: Any) -> tuple[int, Recorder]:
    """Run toy steps in this process."""
    seen = Recorder()
    outcome = session.run(folder, plan(config, **how), {"name": folder.name}, seen, hold)
    return outcome.code, seen


if __name__ == "__main__":
    from eyas.ui.plain import Plain

    options = json.loads(sys.argv[2])
    session.report = lambda folder, strict=True: []
    made, hold = plan(options), 0.0
    if len(sys.argv) > 3:
        made, hold = plan(options, SERVED, WEB), float(sys.argv[3])
    sys.exit(session.run(Path(sys.argv[1]), made, {"name": "toy"}, Plain(), hold).code)
