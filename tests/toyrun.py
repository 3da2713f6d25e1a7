"""Runs toy steps, in this process or as a program: `python toyrun.py RUN_FOLDER CONFIG [GRAPH [HOLD_SECONDS]]`."""

import json
import sys
from pathlib import Path
from typing import Any

from eyas.plan.digests import Plan, make
from eyas.plan.graph import Step
from eyas.run import session
from eyas.run.view import Ahead, View

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
MIXED = (
    Step("one", "toys:work", sections=("one",), resources=("cpu",)),
    Step("side", "toys:work", sections=("side",)),
    Step("asked", "toys:ask", needs=("one",), sections=("asked",), leases=("web",)),
    Step("two", "toys:work", needs=("asked",), sections=("two",), leases=("web",), resources=("cpu",)),
    Step("alone", "toys:work", needs=("two",), sections=("alone",), alone=True),
    Step("export", "toys:work", needs=("alone", "side"), sections=("export",), product=True),
)
GRAPHS = {"chain": (CHAIN, ()), "served": (SERVED, WEB), "mixed": (MIXED, WEB)}


class Recorder:
    """A watcher that remembers."""

    def __init__(self) -> None:
        self.states: list[str] = []
        self.said: list[str] = []
        self.notes: list[str] = []
        self.looked: list[Ahead] = []

    def begin(self, views: list[View], services: list[View]) -> None:
        self.views = {view.name: view for view in views}

    def changed(self, view: View) -> None:
        self.states.append(f"{view.name} {'reused' if view.reused else view.state}")

    def milestone(self, view: View, text: str) -> None:
        self.said.append(f"{view.name}: {text}")

    def note(self, text: str) -> None:
        self.notes.append(text)

    def outlook(self, ahead: Ahead) -> None:
        self.looked.append(ahead)

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
    graph = sys.argv[3] if len(sys.argv) > 3 else "chain"
    hold = sys.argv[4] if len(sys.argv) > 4 else "0"
    made = plan(options, *GRAPHS[graph])
    sys.exit(session.run(Path(sys.argv[1]), made, {"name": "toy"}, Plain(), float(hold)).code)
