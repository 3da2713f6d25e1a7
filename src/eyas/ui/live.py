"""A run as one live table, when stdout is a terminal."""

import time

from rich.console import Console, Group
from rich.live import Live as RichLive
from rich.table import Table
from rich.text import Text

from eyas.run.protocol import printable
from eyas.run.view import Ahead, View
from eyas.ui import bars
from eyas.ui.text import counted, duration, outlook, rate

REFRESH_SECONDS = 0.25
GLYPHS = {"waiting": "·", "running": "▶", "finished": "✓", "failed": "✗", "stopped": "■"}
ASCII_GLYPHS = {"waiting": ".", "running": ">", "finished": "+", "failed": "x", "stopped": "#"}
STYLES = {"waiting": "dim", "running": "cyan", "finished": "green", "failed": "red", "stopped": "yellow"}
BAR_WIDTH, NARROW, WIDE = 14, 60, 96


class Live:
    """A watcher that keeps one table up to date. It uses the terminal's width and does without colour if asked to."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console()
        self._views: list[View] = []
        self._services: list[View] = []
        self._ahead: Ahead | None = None
        self._waits = ""
        self._live = RichLive(console=self.console, auto_refresh=False, vertical_overflow="visible")
        self._next = 0.0

    def begin(self, views: list[View], services: list[View]) -> None:
        """Show the table."""
        self._views, self._services = views, services
        self._live.start()
        self._refresh()

    def changed(self, view: View) -> None:
        """Show the new state; a failure's line stays above the table."""
        if view.state == "failed":
            self.note(f"{view.name} failed: {view.error}")
        self._refresh()

    def milestone(self, view: View, text: str) -> None:
        """The table shows it."""

    def note(self, text: str) -> None:
        """Print a line above the table."""
        self._live.console.print(Text(printable(text, 2000)))

    def outlook(self, ahead: Ahead) -> None:
        """Show it below the table."""
        self._ahead = ahead

    def waits(self, text: str) -> None:
        """Show it below the table."""
        self._waits = text

    def tick(self) -> None:
        """Refresh four times a second."""
        if time.monotonic() >= self._next:
            self._refresh()

    def end(self) -> None:
        """Leave the last state of the table on the screen."""
        self._ahead, self._waits = None, ""
        self._refresh()
        self._live.stop()

    def _refresh(self) -> None:
        self._next = time.monotonic() + REFRESH_SECONDS
        ahead = outlook(self._ahead, time.time()) if self._ahead else ""
        below = [Text(printable(text, 1000), "dim") for text in (ahead, self._waits) if text]
        self._live.update(Group(self.table(), *below), refresh=True)

    def table(self) -> Table:
        """The table as it is now, for this terminal: the steps, and the services that were or will be up."""
        width, now = self.console.width, time.time()
        ascii_only = self.console.options.ascii_only
        glyphs = ASCII_GLYPHS if ascii_only else GLYPHS
        services = [view for view in self._services if view.began is not None or view.coming]
        rows = [(view, view.name) for view in self._views] + [(view, f"load {view.name}") for view in services]
        axis = bars.Axis(span for view, _ in rows for span in bars.spans(view, now))
        bar_width = max(BAR_WIDTH, width // 4 if width > WIDE else 0)
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), width=width, pad_edge=False)
        table.add_column(width=1)
        table.add_column(width=max((len(name) for _, name in rows), default=1), no_wrap=True)
        if width >= NARROW:
            table.add_column(width=bar_width, no_wrap=True)
        table.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
        table.add_column(justify="right", no_wrap=True)
        for view, name in rows:
            style = STYLES[view.state]
            cells = [Text(glyphs[view.state], style), Text(name, f"bold {style}" if view.critical else style)]
            if width >= NARROW:
                cells.append(bars.bar(view, axis, bar_width, now, ascii_only, style))
            table.add_row(*cells, Text(_what(view, width)), Text(_times(view, now), "dim"))
        return table


def _what(view: View, width: int) -> str:
    """Amount, rate (where there is room) and milestone (cut off where there is none)."""
    if view.state == "failed":
        return printable(view.error or "failed")
    if view.state != "running":
        return "reused" if view.reused else ""
    parts = [counted(view)]
    if width >= WIDE:
        parts.append(rate(view))
    parts.append(view.progress.milestone)
    return "  ".join(part for part in parts if part)


def _times(view: View, now: float) -> str:
    """Time taken; for a running step also what is left."""
    if view.state == "running" and view.began is not None:
        eta = view.coming[1] - now if view.coming else view.progress.eta(now)
        if eta is None and view.expected is not None:
            eta = view.expected - (now - view.began)
        return duration(now - view.began) + (f", {duration(max(0.0, eta))} left" if eta is not None else "")
    if view.state == "waiting":
        return f"expected {duration(view.expected)}" if view.expected is not None else ""
    if view.seconds is None and view.began is not None and view.ended is not None:
        return duration(view.ended - view.began)
    return duration(view.seconds)
