"""Progress lines: a step writes them to `progress.jsonl`, everyone else follows that file.

One JSON object a line, each with `t` (unix time): `total`, `unit` and `done`; `done` alone (absolute); `milestone`;
`metric`; and `attempt`, with which every attempt begins. A killed writer may leave half a line: readers skip it and the
next attempt starts on a new one.
"""

import json
import math
import os
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eyas.files import number

ADVANCE_SECONDS = 0.2


class ProgressWriter:
    """The `Progress` of a step's process. May be called from any thread. Raises OSError when the disk is full."""

    def __init__(self, path: Path, attempt: int) -> None:
        self._handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        self._lock = threading.RLock()
        self._done = 0.0
        self._said = 0.0
        self._next = 0.0
        size = os.fstat(self._handle).st_size
        if size and os.pread(self._handle, 1, size - 1) != b"\n":
            os.write(self._handle, b"\n")
        self._write({"attempt": attempt})

    def total(self, amount: float, unit: str, done: float = 0) -> None:
        """See `eyas.progress.Progress`."""
        with self._lock:
            self._done = self._said = done
            self._write({"total": _number(amount), "unit": unit, "done": _number(done)})

    def advance(self, amount: float) -> None:
        """See `eyas.progress.Progress`; written at most five times a second, the rest is summed up."""
        with self._lock:
            self._done += amount
            if time.monotonic() >= self._next:
                self.flush()

    def milestone(self, text: str) -> None:
        """See `eyas.progress.Progress`."""
        with self._lock:
            self.flush()
            self._write({"milestone": text})

    def metric(self, **values: float) -> None:
        """See `eyas.progress.Progress`; a value that is not finite becomes null."""
        with self._lock:
            self.flush()
            self._write({"metric": {name: _number(value) for name, value in values.items()}})

    def flush(self) -> None:
        """Write the `done` that has been summed up and not said yet."""
        with self._lock:
            if self._done != self._said:
                self._said = self._done
                self._next = time.monotonic() + ADVANCE_SECONDS
                self._write({"done": _number(self._done)})

    def _write(self, line: dict[str, Any]) -> None:
        text = json.dumps({"t": round(time.time(), 3), **line}, ensure_ascii=False, allow_nan=False)
        os.write(self._handle, (text + "\n").encode())


def _number(value: float) -> float | int | None:
    value = float(value)
    if not math.isfinite(value):
        return None
    return int(value) if value.is_integer() else value


@dataclass
class ProgressState:
    """What a step's lines have said so far: of its newest attempt, with the metrics of all."""

    attempt: int = 0
    started: float | None = None
    done: float = 0
    total: float | None = None
    unit: str = ""
    milestone: str = ""
    milestones: list[tuple[float, str]] = field(default_factory=list)
    metrics: list[dict[str, Any]] = field(default_factory=list)
    _points: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=60))

    def take(self, line: dict[str, Any]) -> None:
        """Take in one line."""
        t = float(line["t"])
        if "attempt" in line:
            metrics = self.metrics
            self.__init__(metrics=metrics)  # type: ignore[misc]
            self.attempt, self.started = int(line["attempt"]), t
        if "total" in line:
            self.total, self.unit = number(line["total"]), printable(str(line["unit"]))
            self._points.clear()
        if (done := number(line.get("done"))) is not None:
            self.done = done
            if len(self._points) > 1 and t - self._points[-2][0] < 1:
                self._points[-1] = (t, self.done)
            else:
                self._points.append((t, self.done))
        if "milestone" in line:
            self.milestone = printable(str(line["milestone"]))
            self.milestones.append((t, self.milestone))
        if "metric" in line:
            self.metrics.append({"t": t, **line["metric"]})

    @property
    def rate(self) -> float | None:
        """Units a second over the last minute or so, None while unknown."""
        if len(self._points) < 2:
            return None
        (t0, done0), (t1, done1) = self._points[0], self._points[-1]
        return (done1 - done0) / (t1 - t0) if t1 > t0 and done1 > done0 else None

    def eta(self, now: float) -> float | None:
        """Seconds until `done` reaches `total`, as seen at unix time `now`; None while unknown."""
        if self.total is None or self.rate is None:
            return None
        return max(0.0, (self.total - self.done) / self.rate - (now - self._points[-1][0]))


class Follower:
    """Reads a growing progress file; each `read` takes in what was added since."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.state = ProgressState()
        self._offset = 0

    def read(self) -> list[dict[str, Any]]:
        """The new complete lines, already taken into `state`. A missing file has none; damaged lines are skipped."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        end = data.rfind(b"\n") + 1
        self._offset += end
        lines = []
        for text in data[:end].splitlines():
            try:
                line = json.loads(text)
                self.state.take(line)
            except (ValueError, TypeError, KeyError, AttributeError):
                continue
            lines.append(line)
        return lines


def printable(text: str, limit: int = 300) -> str:
    """`text` on one line without control characters, cut at `limit`."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return line if len(line) <= limit else line[: limit - 1] + "…"
