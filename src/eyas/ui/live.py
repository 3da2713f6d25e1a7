"""A run as one live table, when stdout is a terminal."""

import time

from rich.console import Console
from rich.live import Live as RichLive
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from eyas.run.protocol import printable
from eyas.run.view import View
from eyas.ui.text import counted, duration, rate

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
        self._live = RichLive(console=self.console, auto_refresh=False, vertical_overflow="visible")
        self._next = 0.0

    def begin(self, views: list[View]) -> None:
        """Show the table."""
        self._views = views
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

    def tick(self) -> None:
        """Refresh four times a second."""
        if time.monotonic() >= self._next:
            self._refresh()

    def end(self) -> None:
        """Leave the last state of the table on the screen."""
        self._refresh()
        self._live.stop()

    def _refresh(self) -> None:
        self._next = time.monotonic() + REFRESH_SECONDS
        self._live.update(self.table(), refresh=True)

    def table(self) -> Table:
        """The table as it is now, for this terminal."""
        width = self.console.width
        glyphs = ASCII_GLYPHS if self.console.options.ascii_only else GLYPHS
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), width=width, pad_edge=False)
        table.add_column(width=1)
        table.add_column(width=max((len(view.name) for view in self._views), default=1), no_wrap=True)
        if width >= NARROW:
            table.add_column(width=BAR_WIDTH)
        table.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
        table.add_column(justify="right", no_wrap=True)
        for view in self._views:
            style = STYLES[view.state]
            cells: list[Text | ProgressBar] = [Text(glyphs[view.state], style), Text(view.name, style)]
            if width >= NARROW:
                cells.append(_bar(view))
            table.add_row(*cells, Text(_what(view, width)), Text(_times(view), "dim"))
        return table


def _bar(view: View) -> ProgressBar | Text:
    state = view.progress
    if view.state != "running" or not state.total:
        return Text("")
    return ProgressBar(total=state.total, completed=min(state.done, state.total), width=BAR_WIDTH)


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


def _times(view: View) -> str:
    """Time taken; for a running step also what is left."""
    if view.state == "running" and view.began is not None:
        now = time.time()
        eta = view.progress.eta(now)
        if eta is None and view.expected is not None:
            eta = max(0.0, view.expected - (now - view.began))
        return duration(now - view.began) + (f", {duration(eta)} left" if eta is not None else "")
    if view.state == "waiting":
        return f"expected {duration(view.expected)}" if view.expected is not None else ""
    return duration(view.seconds)
