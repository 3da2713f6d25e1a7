"""How long steps take, learned from those before: one sqlite file a user, read by every run.

It lies in `$XDG_STATE_HOME/eyas/` (default `~/.local/state/eyas/`). A row is a step that ended, or a service's load.
What is expected are seconds a unit of work: the median and the spread of the closest rows that there are. Closest: same
host, device and model, and as warm; then without one of these after the other; at last a shipped guess. A step that
failed says only that it takes at least as long (a censored observation, Kaplan and Meier 1958).
"""

import contextlib
import math
import os
import re
import sqlite3
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

MANY, NEWEST, SIMILAR = 10, 40, 2.0
"""Rows from which an estimate is no guess any more; rows of one kind that are looked at; times as much or as little
work that counts as similar, so that what a step takes beside its work does not matter."""
SPREADS = (0.15, 0.2, 0.3, 0.5, 0.8, 1.0)
"""Standard deviation of a logarithm that is assumed at each level of `LEVELS` and for a guess, before rows say more."""
ASSUMED = 2.0
"""How many rows that assumption weighs."""
LEVELS = (
    ("entry", "name", "host", "device", "model", "warm"),
    ("module", "host", "device", "model", "warm"),
    ("module", "host", "device", "model"),
    ("module", "device", "model"),
    ("module", "device"),
)
"""What must be equal; the first level with a row that finished is taken. The loads of all servers are of one module."""

GUESSES: Mapping[str, tuple[float, float]] = {
    "eyas.engines.target:run": (1.0, 0.0),
    "eyas.corpus.step:run": (4.0, 0.0),
    "eyas.engines.answers:run": (2.0, 0.27),
    "eyas.capture.step:run": (2.0, 0.022),
    "eyas.draft.vocabulary:run": (2.0, 0.0),
    "eyas.train.step:run": (5.0, 0.0022),
    "eyas.draft.export:run": (2.0, 0.0),
    "eyas.decode.replay:run": (2.0, 0.027),
    "eyas.decode.step:run": (3.0, 2.0),
    "eyas.bench.verdict:run": (0.1, 0.0),
    "eyas.draft.card:run": (0.1, 0.0),
    "eyas.engines.sglang.twin:run": (100.0, 0.0),
    "eyas.engines.sglang.doctor:run": (20.0, 0.0),
    "eyas.engines.sglang.answers:run": (5.0, 0.01),
    "eyas.capture.served:run": (5.0, 0.0063),
    "eyas.bench.baseline:run": (60.0, 0.0),
    "eyas.bench.served:run": (60.0, 0.0),
    "eyas.bench.again:run": (60.0, 0.0),
    "eyas.bench.sweep:run": (300.0, 0.0),
    "eyas.engines.sglang.service:serve": (60.0, 0.0),
    "eyas.engines.sglang.service:serve_drafted": (60.0, 0.0),
    "eyas.engines.sglang.service:serve_plain": (60.0, 0.0),
}
"""Seconds, and seconds a unit of work, of kinds that were never seen: from the demo on two cores, and a run of 10,000
short samples with a model of 135 million weights on one H200. For a large target they are far too low."""
UNKNOWN = 30.0


@dataclass(frozen=True)
class Kind:
    """What a duration depends on."""

    entry: str
    name: str
    host: str
    device: str
    model: str
    warm: bool = False
    """The files that a service loads were loaded before since the machine started."""

    @property
    def module(self) -> str:
        """Where its entry is."""
        return self.entry.partition(":")[0]


@dataclass(frozen=True)
class Mark:
    """What a step, or the load of a service, said on its way, and at which share of the time that it took."""

    t: float
    entry: str
    device: str
    model: str
    text: str
    """Without its numbers."""
    share: float


@dataclass(frozen=True)
class Row:
    """One step that ended, or one load of a service."""

    t: float
    entry: str
    name: str
    host: str
    boot: str
    device: str
    model: str
    warm: bool
    work: float | None
    """In the units of `Step.work`."""
    seconds: float
    bytes: float
    """Size of its output."""
    finished: bool

    @property
    def module(self) -> str:
        """Where its entry is."""
        return self.entry.partition(":")[0]

    def like(self, kind: Kind, level: tuple[str, ...]) -> bool:
        """Whether it is of this kind, as closely as the level asks."""
        return all(getattr(self, key) == getattr(kind, key) for key in level)


@dataclass(frozen=True)
class Estimate:
    """Seconds that something is going to take: log-normal."""

    seconds: float
    """The median."""
    spread: float
    """Standard deviation of the logarithm."""
    rows: int
    """How many rows it comes from; 0 for a guess."""
    bytes: float | None = None
    """Size of its output, where known."""

    @property
    def high(self) -> float:
        """90th percentile."""
        return self.at(0.9)

    @property
    def guess(self) -> bool:
        """Whether too little is known to rely on its range."""
        return self.rows < MANY

    def at(self, share: float, above: float = 0.0) -> float:
        """The seconds that a share of all cases stays below, among those that take longer than `above`."""
        if self.seconds <= 0:
            return above
        normal = statistics.NormalDist(math.log(self.seconds), max(self.spread, 1e-9))
        under = normal.cdf(math.log(above)) if above > 0 else 0.0
        place = under + (1 - under) * share
        return max(above, math.exp(normal.inv_cdf(min(max(place, 1e-12), 1 - 1e-12))))


class History:
    """Rows and marks of earlier runs, newest first."""

    def __init__(self, rows: Iterable[Row], marks: Iterable[Mark] = ()) -> None:
        self._rows = sorted(rows, key=lambda row: -row.t)
        self._marks = sorted(marks, key=lambda mark: -mark.t)

    def add(self, row: Row, marks: Iterable[Mark] = ()) -> None:
        """Take in what is newer than all before."""
        self._rows.insert(0, row)
        self._marks[:0] = marks

    def share(self, kind: Kind, text: str) -> float | None:
        """The share of its time after which a step or service of this kind says `text`; None when it never did."""
        wanted = (kind.entry, kind.device, kind.model, numberless(text))
        found = [mark.share for mark in self._marks if (mark.entry, mark.device, mark.model, mark.text) == wanted]
        return statistics.median(found[:NEWEST]) if found else None

    def expect(self, kind: Kind, work: float | None) -> Estimate:
        """What a step of this kind and work is going to take."""
        for level, keys in enumerate(LEVELS):
            found = [row for row in self._rows if row.like(kind, keys)][:NEWEST]
            if any(row.finished for row in found):
                return _learned(found, work, SPREADS[level])
        fixed, each = GUESSES.get(kind.entry, (UNKNOWN, 0.0))
        return Estimate(fixed + each * (work or 0.0), SPREADS[-1], 0)

    def warm(self, host: str, boot: str, model: str, entries: set[str]) -> bool:
        """Whether a service of these entries loaded this model on this host since it was started."""
        here = (host, boot, model)
        return any((row.host, row.boot, row.model) == here and row.entry in entries for row in self._rows)


def _learned(rows: list[Row], work: float | None, assumed: float) -> Estimate:
    """From rows of one level, of which at least one finished; from those of similar work, if there are."""
    near = [row for row in rows if work and row.work and work / SIMILAR <= row.work <= work * SIMILAR]
    if any(row.finished for row in near):
        rows = near
    scaled = work and all(row.work for row in rows if row.finished)
    units = [(row, work / row.work if scaled and work and row.work else 1.0) for row in rows if row.work or not scaled]
    seen = [(max(row.seconds, 1e-3) * scale, row.finished) for row, scale in units]
    middle = median(seen)
    logs = [math.log(value / middle) for value, finished in seen if finished]
    squares = ASSUMED * assumed**2 + sum(log**2 for log in logs)
    spread = math.sqrt(squares / (ASSUMED + len(logs)) * (1 + 1 / len(logs)))
    size = statistics.median(row.bytes * scale for row, scale in units if row.finished)
    return Estimate(middle, spread, len(logs), size)


def median(seen: list[tuple[float, bool]]) -> float:
    """Median of values of which some are only lower bounds (False); at least one is not."""
    values = sorted(seen, key=lambda item: (item[0], not item[1]))
    alive, found = 1.0, 0.0
    for number, (value, finished) in enumerate(values):
        if not finished:
            continue
        if math.isclose(alive, 0.5):  # Just half of all are below: the middle lies between two values.
            return (found + value) / 2
        alive *= 1 - 1 / (len(values) - number)
        found = value
        if alive < 0.5 and not math.isclose(alive, 0.5):
            break
    return found


def numberless(text: str) -> str:
    """A milestone as it is said whatever the numbers in it are."""
    return re.sub(r"[\d.,]+", "#", text)


def place() -> Path:
    """The file of this user's history."""
    home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(home) / "eyas" / "durations.sqlite3"


TABLES: dict[str, type[Row] | type[Mark]] = {"durations": Row, "marks": Mark}


def add(row: Row, marks: Sequence[Mark] = ()) -> None:
    """Record a row and its marks. Raises OSError, sqlite3.Error."""
    place().parent.mkdir(parents=True, exist_ok=True)
    with contextlib.closing(sqlite3.connect(place(), timeout=10, isolation_level=None)) as db:
        db.execute("PRAGMA journal_mode=WAL")
        for table, kind in TABLES.items():
            columns = [field.name for field in fields(kind)]
            db.execute(f"CREATE TABLE IF NOT EXISTS {table} ({', '.join(columns)})")
            values = [astuple(row)] if kind is Row else [astuple(mark) for mark in marks]
            db.executemany(f"INSERT INTO {table} VALUES ({', '.join('?' * len(columns))})", values)


def read() -> History:
    """All rows and marks of the last year; none where there is no such file, or a damaged one."""
    path = place()
    if not path.is_file():
        return History([])
    for mode in ("mode=ro", "immutable=1"):
        with (
            contextlib.suppress(sqlite3.Error),
            contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?{mode}", uri=True)) as db,
        ):
            rows, marks = _table(db, "durations"), []
            with contextlib.suppress(sqlite3.Error):
                marks = _table(db, "marks")
            known = [{**row, "warm": bool(row["warm"]), "finished": bool(row["finished"])} for row in rows]
            return History((Row(**row) for row in known), (Mark(**mark) for mark in marks))
    return History([])


def _table(db: sqlite3.Connection, table: str) -> list[dict[str, Any]]:
    names = [field.name for field in fields(TABLES[table])]
    query = f"SELECT {', '.join(names)} FROM {table} WHERE t > ? ORDER BY t DESC LIMIT 20000"
    return [dict(zip(names, row, strict=True)) for row in db.execute(query, (time.time() - 365 * 86400,))]
