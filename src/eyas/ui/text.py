"""Numbers and times in few characters."""

import time

from eyas.run.view import Ahead, View


def duration(seconds: float | None) -> str:
    """`3 s`, `4 min 05 s`, `2 h 07 min`; `–` while unknown."""
    if seconds is None:
        return "–"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def amount(value: float) -> str:
    """At most five characters: 950, 9999, 12.3k, 4.56M."""
    if abs(value) < 9999.5:
        return f"{value:.0f}" if value == int(value) or abs(value) >= 100 else f"{value:.3g}"
    unit = ""
    while abs(value) >= 999.5 and unit != "T":
        value, unit = value / 1000, {"": "k", "k": "M", "M": "G", "G": "T"}[unit]
    return f"{value:.3g}{unit}"


def counted(view: View) -> str:
    """`1200/5000 rows`, as far as it is known."""
    state = view.progress
    if state.total is None:
        return ""
    return f"{amount(state.done)}/{amount(state.total)} {state.unit}"


def rate(view: View) -> str:
    """`340 rows/s`, or nothing."""
    value = view.progress.rate
    return f"{amount(value)} {view.progress.unit}/s" if value else ""


def outlook(ahead: Ahead, now: float) -> str:
    """`done in 12 min (10 min to 15 min in 9 of 10 runs), at 14:05: load server → answers → …`."""
    sure = "a guess, from little history" if ahead.guess else "in 9 of 10 runs"
    left, low, high = (duration(max(0.0, t - now)) for t in (ahead.end, ahead.low, ahead.high))
    clock = time.strftime("%H:%M", time.localtime(ahead.end))
    return f"done in {left} ({low} to {high}, {sure}), at {clock}: {' → '.join(ahead.chain)}"
