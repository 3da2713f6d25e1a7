"""Bars on a common axis of time: what was planned behind what came and what is still expected."""

from collections.abc import Iterable
from itertools import pairwise

from rich.text import Text

from eyas.run.view import View

DONE, COMING, PLANNED = "█", "▒", "░"
ASCII = {"█": "#", "▒": "=", "░": "-"}
GAP_SHARE = 0.1
"""A stretch of time in which nothing ran, or was going to, is drawn no longer than this share of the axis."""

Span = tuple[float, float]


class Axis:
    """Times to places between 0 and 1; long gaps are drawn short."""

    def __init__(self, spans: Iterable[Span]) -> None:
        merged: list[list[float]] = []
        for start, end in sorted(spans):
            if merged and start <= merged[-1][1]:
                merged[-1][1] = max(merged[-1][1], end)
            else:
                merged.append([start, end])
        busy = sum(end - start for start, end in merged)
        self._points: list[tuple[float, float]] = []
        place = 0.0
        for number, (start, end) in enumerate(merged):
            if number:
                place += min(start - merged[number - 1][1], GAP_SHARE * busy)
            self._points += [(start, place), (end, place := place + end - start)]
        self._whole = place or 1.0

    def place(self, t: float) -> float:
        """Where a time lies."""
        if not self._points or t <= self._points[0][0]:
            return 0.0
        for (t0, place0), (t1, place1) in pairwise(self._points):
            if t <= t1:
                return (place0 + (place1 - place0) * (t - t0) / (t1 - t0 or 1.0)) / self._whole
        return 1.0


def spans(view: View, now: float) -> list[Span]:
    """All that a view's bar shows."""
    found = [span for span in (view.planned, view.coming) if span]
    return found + ([(view.began, view.ended or now)] if view.began is not None else [])


def bar(view: View, axis: Axis, width: int, now: float, plain: bool, style: str) -> Text:
    """`width` characters; `plain` where the terminal knows ASCII only."""
    cells = [" "] * width

    def fill(span: Span | None, sign: str) -> None:
        if span is not None:
            first = min(width - 1, int(axis.place(span[0]) * width))
            last = min(width, max(first + 1, round(axis.place(span[1]) * width)))
            cells[first:last] = sign * (last - first)

    fill(view.planned, PLANNED)
    if view.state in ("waiting", "running"):
        fill(view.coming, COMING)
    if view.began is not None and not view.reused:
        fill((view.began, view.ended or now), DONE)
    text = "".join(cells)
    if plain:
        text = text.translate({ord(sign): other for sign, other in ASCII.items()})
    return Text(text, f"bold {style}" if view.critical else style)
