"""What a runner shows of its steps, and to whom."""

from dataclasses import dataclass, field
from typing import Literal, Protocol

from eyas.files import number
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
    """Seconds that it is going to take, all attempts together."""
    planned: tuple[float, float] | None = None
    """From when to when it was going to run when this run began, in unix time."""
    coming: tuple[float, float] | None = None
    """From when to when it is going to run, as seen now."""
    critical: bool = False
    """Whether the end of the run waits for it."""

    def whole(self) -> float:
        """Seconds that it took as its runner sees it: what it worked, and the start and end of its process."""
        attempt = number(self.folder.exit().get("seconds"))
        if attempt is None or self.began is None or self.ended is None:
            return self.seconds or 0.0
        return (self.seconds or 0.0) + max(0.0, self.ended - self.began - attempt)


@dataclass(frozen=True)
class Ahead:
    """When a run will be done, in unix time."""

    end: float
    low: float
    high: float
    """Nine of ten runs end between `low` and `high`."""
    guess: bool
    """Too little is known to rely on that."""
    chain: list[str]
    """The critical path: steps, and loads as `load SERVICE`."""


class Watcher(Protocol):
    """Somebody who shows a run: the live table, plain lines, a test."""

    def begin(self, views: list[View], services: list[View]) -> None:
        """The run starts."""

    def changed(self, view: View) -> None:
        """A step came into another state."""

    def milestone(self, view: View, text: str) -> None:
        """A step said what it is doing now."""

    def note(self, text: str) -> None:
        """The runner has something to say that concerns no single step's state."""

    def outlook(self, ahead: Ahead) -> None:
        """The runner has looked ahead."""

    def waits(self, text: str) -> None:
        """What the runner itself waits for, as of now."""

    def tick(self) -> None:
        """Called about ten times a second while the run goes on."""

    def end(self) -> None:
        """The run is over, for whatever reason."""
