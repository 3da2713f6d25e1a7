"""The progress of one piece of work in this process, as lines on stderr: stdout is for its result."""

import sys
import time

from eyas.run.protocol import printable
from eyas.ui.text import amount as short

EVERY_SECONDS = 5.0


class Lines:
    """A `Progress` that prints milestones, and how far it is every five seconds."""

    def __init__(self) -> None:
        self._done = 0.0
        self._total = 0.0
        self._unit = ""
        self._next = time.monotonic() + EVERY_SECONDS

    def total(self, amount: float, unit: str, done: float = 0) -> None:
        """See `eyas.progress.Progress`."""
        self._total, self._unit, self._done = amount, unit, done

    def advance(self, amount: float) -> None:
        """See `eyas.progress.Progress`."""
        self._done += amount
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + EVERY_SECONDS
            self.milestone(f"{short(self._done)}/{short(self._total)} {self._unit}")

    def milestone(self, text: str) -> None:
        """See `eyas.progress.Progress`."""
        say(text)

    def metric(self, **values: float) -> None:
        """Not shown."""


def say(text: str) -> None:
    """Print a line on stderr."""
    print(printable(text, 2000), file=sys.stderr, flush=True)
