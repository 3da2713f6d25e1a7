"""A run as plain lines, for logs and pipes: one at each change, and progress at most every ten seconds a step."""

import sys
import time

from eyas.run.protocol import printable
from eyas.run.view import Ahead, View
from eyas.ui.text import counted, duration, outlook, rate

EVERY_SECONDS, OUTLOOK_SECONDS = 10.0, 300.0


class Plain:
    """A watcher that prints lines without control characters."""

    def __init__(self) -> None:
        self._views: list[View] = []
        self._started = time.time()
        self._said: dict[str, float] = {}
        self._looked = self._waited = 0.0

    def begin(self, views: list[View], services: list[View]) -> None:
        """Remember the steps."""
        self._views = views

    def changed(self, view: View) -> None:
        """Print the new state."""
        self._said[view.name] = time.time()
        if view.state == "finished":
            text = "finished before, reused" if view.reused else f"finished in {duration(view.seconds)}"
        elif view.state == "failed":
            text = f"failed: {view.error}"
        else:
            text = view.state
        self._line(f"{view.name}: {text}")

    def milestone(self, view: View, text: str) -> None:
        """Print what the step says."""
        self._line(f"{view.name}: {text}")

    def note(self, text: str) -> None:
        """Print it."""
        self._line(text)

    def outlook(self, ahead: Ahead) -> None:
        """Print it every five minutes."""
        if time.time() - self._looked >= OUTLOOK_SECONDS:
            self._looked = time.time()
            self._line(outlook(ahead, self._looked))

    def waits(self, text: str) -> None:
        """Print it every five minutes."""
        if time.time() - self._waited >= OUTLOOK_SECONDS:
            self._waited = time.time()
            self._line(text)

    def tick(self) -> None:
        """Print progress that is due."""
        now = time.time()
        for view in self._views:
            if view.state == "running" and now - self._said.get(view.name, 0) >= EVERY_SECONDS:
                self._said[view.name] = now
                eta = view.progress.eta(now)
                left = f"{duration(eta)} left" if eta is not None else ""
                parts = [part for part in (counted(view), rate(view), left) if part]
                if parts:
                    self._line(f"{view.name}: {', '.join(parts)}")

    def end(self) -> None:
        """Nothing to clean up."""

    def _line(self, text: str) -> None:
        minutes, seconds = divmod(int(time.time() - self._started), 60)
        print(f"[{minutes:02d}:{seconds:02d}] {printable(text, 2000)}", file=sys.stdout, flush=True)
