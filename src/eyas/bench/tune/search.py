"""The search: one factor at a time from the default, the winners combined, the result confirmed.

A load is dear and a block is cheap, so that each setting gets one load, and blocks there until its interval has left 1
(`trial.RUNGS`: 1, 2, 4 times as many), a gain twice in a row. Factors race in rounds: the most promising setting of
each comes first, and one that was slower takes those behind it out of the race. What is faster in different factors is
combined. The better of combination and best single setting then meets the default again, in turns and in fresh loads,
since the best of many noisy figures is partly luck.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, Protocol

from eyas.bench.tune.space import DEFAULT, Factor, Setting
from eyas.bench.tune.trial import Blocks, Trial, compared

PERIODS = 3
"""Of the confirmation: two of one configuration around one of the other."""
Ratio = dict[str, float | None]
NO_RATIO: Ratio = {"ratio": None, "low": None, "high": None}
SPENT = "bench.max_loads was spent before"


class Server(Protocol):
    """What the search needs of `trial.Trials`."""

    loads: int
    last: Setting | None

    def take(self, setting: Setting, enough: Callable[[Blocks], bool], part: str = "search") -> Trial:
        """See Trials."""
        ...


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    factor: str
    setting: Setting
    trial: Trial | None = None
    """None: it was not run."""
    ratio: Ratio = field(default_factory=lambda: NO_RATIO)
    """Against the default."""
    why: str | None = None
    """Why there is no ratio."""

    def to_json(self) -> dict[str, Any]:
        """For tune.json."""
        trial = self.trial
        state = "not run" if trial is None else "failed" if trial.failed else "measured"
        return {
            "factor": self.factor,
            **self.setting.to_json(),
            "state": state,
            "ratio": self.ratio,
            "why": self.why,
            "figures": trial.figures() if trial else {},
            "blocks": sum(map(len, trial.blocks.values())) if trial else 0,
            "loads": trial.loads if trial else 0,
            "start_seconds": trial.start_seconds if trial else None,
            "seconds": trial.seconds if trial else None,
        }


def search(default: Trial, factors: Sequence[Factor], server: Server, most: int) -> list[Row]:
    """A row for each setting of each factor, and one for the combination; `most`: loads that may be taken, the
    confirmation's included."""
    rows: list[Row] = []
    lost: set[str] = set()
    lined = zip_longest(*([(factor, one) for one in factor.settings] for factor in factors))
    for factor, setting in (pair for turn in lined for pair in turn if pair is not None):
        if factor.name in lost:
            rows.append(Row(factor.name, setting, why="a smaller change in this direction was slower, or failed"))
        elif server.loads + 1 + _kept_back(rows) > most:
            rows.append(Row(factor.name, setting, why=SPENT))
        else:
            rows.append(_row(factor.name, setting, default, server))
            if factor.ordered and (rows[-1].why or (rows[-1].ratio["high"] or 1) < 1):
                lost.add(factor.name)
    winners = _winners(rows)
    if len(winners) > 1:
        together = winners[0].setting
        for row in winners[1:]:
            together |= row.setting
        rows.append(_row("combination", together, default, server))
    return rows


def _kept_back(rows: Sequence[Row]) -> int:
    """Loads that are not for the next setting: the confirmation's, and one for a combination, if it can come to that.

    Before anything has won, the next setting's own server would be up for its confirmation.
    """
    return PERIODS + 1 if _winners(rows) else PERIODS - 1


def _row(factor: str, setting: Setting, default: Trial, server: Server) -> Row:
    trial = server.take(setting, _Looks(default))
    if trial.failed:
        return Row(factor, setting, trial, why=trial.failed)
    return Row(factor, setting, trial, compared(default.blocks, trial.blocks))


class _Looks:
    """Whether a trial's blocks are enough: a loss ends it at once, a gain when it is there at two looks in a row, since
    a false one would cost the loads of a confirmation."""

    def __init__(self, default: Trial) -> None:
        self._default, self._gains = default, 0

    def __call__(self, blocks: Blocks) -> bool:
        ratio = compared(self._default.blocks, blocks)
        self._gains = self._gains + 1 if (ratio["low"] or 0) > 1 else 0
        return self._gains > 1 or (ratio["high"] or 1) < 1


def _winners(rows: Sequence[Row]) -> list[Row]:
    """The best row of each factor that is measurably faster than the default, the fastest first."""
    best: dict[str, Row] = {}
    for row in sorted(rows, key=lambda row: -(row.ratio["ratio"] or 0)):
        if (row.ratio["low"] or 0) > 1:
            best.setdefault(row.factor, row)
    return list(best.values())


def choose(rows: Sequence[Row]) -> Row | None:
    """The fastest of those that are measurably faster than the default; None: there is none."""
    return next(iter(_winners(rows)), None)


@dataclass(frozen=True)
class Confirmation:
    """The chosen setting against the default, in turns."""

    ratio: Ratio
    drift: float | None
    """How many times as fast the last period of the outer configuration was as its first."""
    order: list[str]
    why: str | None
    """Why the default is kept; None: the setting is the winner."""

    def to_json(self) -> dict[str, Any]:
        """For tune.json."""
        return {"ratio": self.ratio, "drift": self.drift, "order": self.order, "why": self.why}


def confirm(chosen: Setting, server: Server) -> Confirmation:
    """A-B-A over reloads, beginning with the configuration whose server is up, if it is one of both."""
    outer, inner = (chosen, DEFAULT) if server.last == chosen else (DEFAULT, chosen)
    order = [outer.name, inner.name, outer.name]
    periods = []
    for number, setting in enumerate((outer, inner, outer), 1):
        trial = server.take(setting, lambda _: False, f"confirmation {number} of {PERIODS}")
        if trial.failed:
            why = f"{setting.name} failed when it was loaded again: {trial.failed}"
            return Confirmation(NO_RATIO, None, order, why)
        periods.append(trial.blocks)
    first, middle, last = periods
    both: Blocks = {at: [*first[at], *last[at]] for at in first}
    ratio = compared(middle, both) if outer is chosen else compared(both, middle)
    return judge(ratio, compared(first, last)["ratio"], order)


def judge(ratio: Ratio, drift: float | None, order: list[str]) -> Confirmation:
    """The default is kept unless the interval lies above 1, and the gain above the drift."""
    value, low, high = ratio["ratio"], ratio["low"], ratio["high"]
    why = None
    if value is None or low is None or high is None:
        why = "its ratio to the default could not be measured"
    elif low <= 1:
        why = f"confirmed it is {value:.3f} times as fast as the default, {low:.3f} to {high:.3f}: no certain gain"
    elif drift is not None and max(drift, 1 / drift) >= value:
        why = f"{order[0]} drifted by {drift:.3f} between its loads, as much as the gain of {value:.3f}"
    return Confirmation(ratio, drift, order, why)
