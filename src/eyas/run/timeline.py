"""timeline.json: a run as a Chrome trace, for Perfetto and the report."""

import time
from typing import Any

from eyas.plan.digests import Plan
from eyas.run.view import View


def timeline(
    name: str,
    plan: Plan,
    views: list[View],
    started: float,
    loads: list[tuple[str, float, float]],
    first: dict[str, Any],
) -> dict[str, Any]:
    """One row a step and a service, in microseconds since `started`; milestones as instants; a reused step is a mark at
    the start.

    A step that an earlier runner had started begins before zero, so that its length is true. `loads` are services with
    start and end of each load, `first` the first forecast (`run/outlook.py`).
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
        steps[view.name] = {**about, "error": view.error, "expected": _length(first.get("steps", {}).get(view.name))}
    for row, service in enumerate(dict.fromkeys(service for service, _, _ in loads), start=len(views) + 1):
        events.append(_meta("thread_name", row, service))
        events += [
            {
                "ph": "X",
                "name": f"load {service}",
                "cat": "load",
                "ts": _us(begin - started),
                "dur": _us(end - begin),
                "pid": 1,
                "tid": row,
            }
            for one, begin, end in loads
            if one == service
        ]
    return {
        "traceEvents": events,
        "otherData": {"run": name, "started": started, "steps": steps, **_overlap(views, loads, first)},
    }


def _overlap(
    views: list[View], loads: list[tuple[str, float, float]], first: dict[str, Any]
) -> dict[str, dict[str, float | None]]:
    """Seconds that the run took and was expected to take, and the sum of all that it did; empty if it did nothing."""
    spans = [(view.began, view.ended) for view in views if not view.reused and view.began and view.ended]
    spans += [(begin, end) for _, begin, end in loads]
    if not spans:
        return {}
    took = max(end for _, end in spans) - min(begin for begin, _ in spans)
    expected = {key: first[key] - first["t"] if first else None for key in ("end", "low", "high")}
    return {"overlap": {"took": took, "one_after_another": sum(end - begin for begin, end in spans), **expected}}


def _length(span: dict[str, float] | None) -> float | None:
    return span["end"] - span["start"] if span else None


def _meta(kind: str, row: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": 1, "tid": row, "args": {"name": name}}


def _us(seconds: float) -> int:
    return round(seconds * 1e6)
