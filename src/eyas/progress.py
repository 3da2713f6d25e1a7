"""What a step says while it works.

A step receives a `Progress` and never prints: the step runner turns the calls into JSON lines (`run/protocol.py`) that
the executor, the live table and the report read.
"""

from typing import Protocol


class Progress(Protocol):
    """The channel of a running step."""

    def total(self, amount: float, unit: str, done: float = 0) -> None:
        """Say how much there is to do, in `unit` ("tokens", "rows", "steps"), and how much an earlier attempt did."""

    def advance(self, amount: float) -> None:
        """Say that `amount` more units are finished."""

    def milestone(self, text: str) -> None:
        """Say in a few words what is happening now ("loading the target")."""

    def metric(self, **values: float) -> None:
        """Record measurements of this moment (`loss=2.3, step=40`); they become curves in the report."""


class Silent:
    """A progress that nobody watches: for use as a library and in tests."""

    def total(self, amount: float, unit: str, done: float = 0) -> None:
        """Ignore."""

    def advance(self, amount: float) -> None:
        """Ignore."""

    def milestone(self, text: str) -> None:
        """Ignore."""

    def metric(self, **values: float) -> None:
        """Ignore."""
