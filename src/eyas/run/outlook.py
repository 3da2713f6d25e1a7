"""The outlook of a run that goes on: what is expected of its steps, from now, as often as it may have changed.

It is written to `forecast.json`, which `eyas watch`, `eyas status` and the report read.
"""

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from eyas.files import write_json
from eyas.plan import forecast
from eyas.plan.digests import Planned
from eyas.plan.durations import Estimate
from eyas.plan.forecast import Forecast, Running
from eyas.plan.schedule import State
from eyas.run.expected import Expected
from eyas.run.folder import RunFolder
from eyas.run.view import Ahead, View

EVERY_SECONDS, SOON_SECONDS, DRAWS = 30.0, 2.0, 25
COST_SHARE = 0.0025
"""Forecasts take at most this share of the time that goes by, however large the graph is."""
LEAST_LEFT = 0.05
"""Of a step that goes on where it stopped, at least this share is expected to be left."""


@dataclass
class Outlook:
    """Forecasts of one run, newest last."""

    views: Mapping[str, View]
    services: Mapping[str, View]
    expected: Expected
    forecast: Forecast | None = None
    at: float = 0.0
    """When `forecast` was made, in unix time."""
    began: float = field(default_factory=time.time)
    first: dict[str, Any] | None = None
    """What was written the first time, for comparison with what came."""
    _stale: bool = True
    _cost: float = 0.0
    """Processor seconds that the last one took."""

    def stale(self) -> None:
        """Something happened that a forecast depends on."""
        self._stale = True

    def due(self) -> bool:
        """Whether it is time for another forecast."""
        wait = max(SOON_SECONDS if self._stale else EVERY_SECONDS, self._cost / COST_SHARE)
        return time.time() - self.at >= wait

    def look(self, state: State) -> None:
        """Make a forecast and note in the views what it says of them."""
        now, used = time.time(), time.process_time()
        steps, services = self.expected.steps(), self.expected.services()
        for name in state.running | (steps.keys() - state.finished - state.lost):
            self.views[name].expected = steps[name].seconds
        planned = {one.name: one for one in (*self.expected.plan.steps, *self.expected.plan.services)}
        running = {name: self._running(planned[name], self.views[name], now) for name in state.running}
        loading = {
            name: self._running(planned[name], self.services[name], now)
            for name, ready in state.up.items()
            if not ready
        }
        left = {
            name: _left(estimate, self.views[name]) if name not in state.running else estimate
            for name, estimate in steps.items()
        }
        self.forecast = forecast.make(self.expected.plan, left, services, state, running, loading, DRAWS)
        self.at, self._stale = now, False
        for name, view in self.views.items():
            span = self.forecast.run.steps.get(name)
            view.coming = (now + span.start, now + span.end) if span else None
            view.planned = view.planned or view.coming
            view.critical = name in self.forecast.chain
        for name, view in self.services.items():
            spans = [span for one, span in self.forecast.run.loads if one == name]
            view.coming = (now + spans[0].start, now + spans[0].end) if spans else None
            view.planned = view.planned or view.coming
            view.critical = f"load {name}" in self.forecast.chain
            view.expected = services[name].seconds
        self._cost = time.process_time() - used

    def _running(self, planned: Planned, view: View, now: float) -> Running:
        elapsed = view.folder.seconds()
        if elapsed is None:
            elapsed = now - (view.began or now)
        return Running(max(0.0, elapsed), self.expected.share(planned, view.progress, now))

    def ahead(self) -> Ahead | None:
        """When the run will be done; None when nothing is left."""
        if self.forecast is None or not self.forecast.run.steps:
            return None
        low, high = self.at + self.forecast.low, self.at + self.forecast.high
        return Ahead(self.at + self.forecast.seconds, low, high, self.forecast.guess, self.forecast.chain)

    def as_json(self) -> dict[str, Any]:
        """What forecast.json holds; times in unix seconds."""
        assert self.forecast is not None
        found = self.forecast
        now: dict[str, Any] = {
            "t": self.at,
            "end": self.at + found.seconds,
            "low": self.at + found.low,
            "high": self.at + found.high,
            "guess": found.guess,
            "critical": found.chain,
            "one_after_another": found.alone,
            "steps": {name: asdict(span) for name, span in found.run.steps.items()},
            "loads": [{"service": name, **asdict(span)} for name, span in found.run.loads],
        }
        for span in (*now["steps"].values(), *now["loads"]):
            span["start"], span["end"] = span["start"] + self.at, span["end"] + self.at
        self.first = self.first or now
        return {"began": self.began, "now": now, "first": self.first}

    def write(self, run: RunFolder) -> None:
        """Write forecast.json."""
        write_json(run.forecast, self.as_json())


def _left(estimate: Estimate, view: View) -> Estimate:
    """Of a step that waits; it may have worked before."""
    spent = view.folder.seconds() if view.folder.path.exists() else None
    if not spent or view.state == "finished":
        return estimate
    return replace(estimate, seconds=max(estimate.seconds - spent, LEAST_LEFT * estimate.seconds))
