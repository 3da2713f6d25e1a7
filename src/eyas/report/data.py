"""Read a run folder, whatever state it is in.

A report is wanted most after something went wrong, so nothing here raises for a file that is missing, cut off or
strange: what cannot be read is None or empty, and the page says so.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Phase:
    """A stretch of work between two announcements of a total."""

    unit: str
    total: float
    first: float
    """Done already when it began, by an earlier attempt."""
    done: float
    seconds: float

    @property
    def rate(self) -> float | None:
        """Units a second."""
        return (self.done - self.first) / self.seconds if self.seconds > 0 and self.done > self.first else None


@dataclass(frozen=True)
class Step:
    """One step of the run, as far as it came."""

    name: str
    digest: str
    state: str
    reused: bool
    seconds: float | None
    error: str | None
    span: tuple[float, float] | None
    """Start and end in seconds since the run started."""
    phase: Phase | None
    """The longest stretch of its work."""
    metrics: list[dict[str, Any]]
    result: dict[str, Any]

    @property
    def failed(self) -> bool:
        """It ended with an error."""
        return self.state == "failed" or self.error is not None


@dataclass(frozen=True)
class Run:
    """A run folder's content."""

    name: str
    steps: list[Step]
    verdict: dict[str, Any]
    """Empty while there is none."""
    config: str | None
    versions: dict[str, str]
    overlap: dict[str, Any]
    """What the run took, was expected to take, and would have taken one after another; empty if it did nothing."""

    def step(self, name: str) -> Step | None:
        """The step of this name, if the run has one."""
        return next((step for step in self.steps if step.name == name), None)


def read(folder: Path) -> Run:
    """Read the run folder's files into one value."""
    timeline = mapping(_json(folder / "timeline.json"))
    other = mapping(timeline.get("otherData"))
    spans = _spans(timeline)
    steps = [
        _step(folder / "steps" / name, name, mapping(entry), spans.get(name))
        for name, entry in mapping(other.get("steps")).items()
    ]
    if not steps:
        steps = _steps_on_disk(folder / "steps")
    return Run(
        name=str(other.get("run") or folder.name),
        steps=steps,
        verdict=_verdict(folder, steps),
        config=_text(folder / "run.yaml"),
        versions=flatten(mapping(_json(folder / "versions.json"))),
        overlap=mapping(other.get("overlap")),
    )


def mapping(value: Any) -> dict[str, Any]:
    """`value` if it is a JSON object, else an empty one."""
    return value if isinstance(value, dict) else {}


def rows(value: Any) -> list[dict[str, Any]]:
    """The objects of a JSON array."""
    return [row for row in value if isinstance(row, dict)] if isinstance(value, list) else []


def number(value: Any) -> float | None:
    """A finite number, or None."""
    finite = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if finite else None


def flatten(value: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested objects as `outer.inner` names with their text."""
    flat: dict[str, str] = {}
    for name, item in value.items():
        if isinstance(item, dict):
            flat |= flatten(item, f"{prefix}{name}.")
        else:
            flat[prefix + name] = item if isinstance(item, str) else json.dumps(item, ensure_ascii=False)
    return flat


def curve(metrics: list[dict[str, Any]], x: str, y: str) -> tuple[list[float], list[float]]:
    """Measurements of `y` over `x`, sorted; of a step that was said twice (after a resume) the later one."""
    points: dict[float, tuple[float, float]] = {}
    for line in metrics:
        step, across, up = number(line.get("step")), number(line.get(x)), number(line.get(y))
        if step is not None and across is not None and up is not None:
            points[step] = (across, up)
    ordered = sorted(points.values())
    return [point[0] for point in ordered], [point[1] for point in ordered]


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except (OSError, ValueError):
        return None


def _verdict(folder: Path, steps: list[Step]) -> dict[str, Any]:
    """verdict.json, unless the run went on since and has not reached its verdict again."""
    step = next((step for step in steps if step.name == "verdict"), None)
    if steps and (step is None or not step.result):
        return {}
    return mapping(_json(folder / "verdict.json")) or (step.result if step else {})


def _spans(timeline: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """First start and last end of each named event."""
    spans: dict[str, tuple[float, float]] = {}
    for event in rows(timeline.get("traceEvents")):
        start, length = number(event.get("ts")), number(event.get("dur"))
        if event.get("ph") != "X" or start is None or length is None:
            continue
        begin, end = start / 1e6, (start + max(0.0, length)) / 1e6
        name = str(event.get("name"))
        earlier = spans.get(name, (begin, end))
        spans[name] = (min(begin, earlier[0]), max(end, earlier[1]))
    return spans


def _steps_on_disk(root: Path) -> list[Step]:
    """Without a timeline: the newest folder of every step, in the order in which they were written."""
    newest = []
    for home in sorted(root.iterdir()) if root.is_dir() else []:
        folders = [(entry.stat().st_mtime, entry.name) for entry in home.glob("*/")]
        if folders:
            newest.append((max(folders), home))
    return [_step(home, home.name, {"digest": digest}, None) for (_, digest), home in sorted(newest)]


def _step(home: Path, name: str, entry: dict[str, Any], span: tuple[float, float] | None) -> Step:
    digest = str(entry.get("digest") or "")
    folder = home / digest
    ended = mapping(_json(folder / "exit.json"))
    said = _lines(folder / "progress.jsonl")
    result = mapping(_json(folder / "out" / "result.json"))
    error = entry.get("error") or (None if result else ended.get("error"))
    seconds = number(entry.get("seconds"))
    return Step(
        name=name,
        digest=digest,
        state=str(entry.get("state") or ("finished" if result else "failed" if error else "unfinished")),
        reused=entry.get("reused") is True,
        seconds=number(ended.get("seconds")) if seconds is None else seconds,
        error=str(error) if error else None,
        span=span,
        phase=_longest_phase(said),
        metrics=[mapping(line["metric"]) for line in said if "metric" in line],
        result=result,
    )


def _lines(path: Path) -> list[dict[str, Any]]:
    """JSON lines; one that was cut off by a kill is left out."""
    said = []
    for line in (_text(path) or "").splitlines():
        try:
            said.append(mapping(json.loads(line)))
        except (ValueError, RecursionError):
            continue
    return said


def _longest_phase(said: list[dict[str, Any]]) -> Phase | None:
    phases: list[Phase] = []
    began = 0.0
    for line in said:
        now, total, done = number(line.get("t")), number(line.get("total")), number(line.get("done"))
        if now is None:
            continue
        if total is not None:
            began, first = now, done or 0.0
            phases.append(Phase(str(line.get("unit") or ""), total, first, first, 0.0))
        elif done is not None and phases:
            last = phases[-1]
            phases[-1] = Phase(last.unit, last.total, last.first, done, max(0.0, now - began))
    return max(phases, key=lambda phase: phase.seconds, default=None)
