"""timeline.json: a run as a Chrome trace, for Perfetto and the report."""

import time
from typing import Any

from eyas.plan.digests import Plan
from eyas.run.view import View


def timeline(name: str, plan: Plan, views: list[View], started: float) -> dict[str, Any]:
    """One row a step, in microseconds since `started`; milestones as instants; a reused step is a mark at the start.

    A step that an earlier runner had started begins before zero, so that its length is true.
    """
    events: list[dict[str, Any]] = [_meta("process_name", 0, f"eyas run {name}")]
    steps = {}
    now = time.time()
    for row, (planned, view) in enumerate(zip(plan.steps, views, strict=True), start=1):
        events.append(_meta("thread_name", row, view.name))
        where = {"pid": 1, "tid": row}
        about = {"digest": planned.digest, "state": view.state, "reused": view.reused, "seconds": view.seconds}
        if view.reused:
            events.append({"ph": "X", "name": view.name, "cat": "reused", "ts": 0, "dur": 0, **where, "args": about})
        elif view.began is not None:
            begin, end = view.began, view.ended or now
            events.append(
                {
                    "ph": "X",
                    "name": view.name,
                    "ts": _us(begin - started),
                    "dur": _us(end - begin),
                    **where,
                    "args": about,
                }
            )
            events += [
                {"ph": "i", "s": "t", "name": text, "ts": _us(t - started), **where}
                for t, text in view.progress.milestones
            ]
        steps[view.name] = {**about, "error": view.error}
    return {"traceEvents": events, "otherData": {"run": name, "started": started, "steps": steps}}


def _meta(kind: str, row: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": 1, "tid": row, "args": {"name": name}}


def _us(seconds: float) -> int:
    return round(seconds * 1e6)
