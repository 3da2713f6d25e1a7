"""What a runner shows of its steps, and to whom."""

from dataclasses import dataclass, field
from typing import Literal, Protocol

from eyas.run.folder import StepFolder
from eyas.run.protocol import ProgressState

State = Literal["waiting", "running", "finished", "failed", "stopped"]


@dataclass
class View:
    """One step as seen from outside."""

    name: str
    folder: StepFolder
    state: State = "waiting"
    reused: bool = False
    progress: ProgressState = field(default_factory=ProgressState)
    began: float | None = None
    """Unix time at which this run started it or found it running."""
    ended: float | None = None
    seconds: float | None = None
    """Seconds that it worked, all attempts together; known once it ended."""
    error: str | None = None
    expected: float | None = None
    """Seconds that it took before, scaled by its work."""


class Watcher(Protocol):
    """Somebody who shows a run: the live table, plain lines, a test."""

    def begin(self, views: list[View]) -> None:
        """The run starts."""

    def changed(self, view: View) -> None:
        """A step came into another state."""

    def milestone(self, view: View, text: str) -> None:
        """A step said what it is doing now."""

    def note(self, text: str) -> None:
        """The runner has something to say that concerns no single step's state."""

    def tick(self) -> None:
        """Called about ten times a second while the run goes on."""

    def end(self) -> None:
        """The run is over, for whatever reason."""
