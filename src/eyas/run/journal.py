"""The journal of a run folder: every change of state in order, and how long each step took.

A folder is the truth, the journal is its history. Each entry is durable before the runner acts on it.
"""

import contextlib
import sqlite3
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from eyas.errors import UserError

SCHEMA = """
CREATE TABLE IF NOT EXISTS runs (id INTEGER PRIMARY KEY, t REAL, pid INTEGER, host TEXT, ended REAL, outcome TEXT);
CREATE TABLE IF NOT EXISTS events (run INTEGER, t REAL, step TEXT, digest TEXT, state TEXT, detail TEXT);
CREATE TABLE IF NOT EXISTS durations (
    t REAL, step TEXT, host TEXT, device TEXT, model TEXT, work REAL, units REAL, unit TEXT, seconds REAL, outcome TEXT
);
"""


class Journal:
    """Writes the journal. Raises UserError: disk full, read-only folder, damaged file."""

    def __init__(self, path: Path, pid: int, host: str) -> None:
        self.path = path
        self.host = host
        with self._plain():
            self._db = sqlite3.connect(path, isolation_level=None)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
            self._db.executescript(SCHEMA)
            cursor = self._db.execute("INSERT INTO runs (t, pid, host) VALUES (?, ?, ?)", (time.time(), pid, host))
        self.run = int(cursor.lastrowid or 0)

    def event(self, step: str, digest: str, state: str, detail: str = "") -> None:
        """Record that a step comes into a state."""
        with self._plain():
            row = (self.run, time.time(), step, digest, state, detail)
            self._db.execute("INSERT INTO events VALUES (?, ?, ?, ?, ?, ?)", row)

    def duration(
        self,
        step: str,
        device: str,
        model: str,
        work: float | None,
        units: float,
        unit: str,
        seconds: float,
        outcome: str,
    ) -> None:
        """Record how long a step has worked, all its attempts together, for how many units."""
        with self._plain():
            row = (time.time(), step, self.host, device, model, work, units, unit, seconds, outcome)
            self._db.execute("INSERT INTO durations VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", row)

    def end(self, outcome: str) -> None:
        """Record how the run ended, and close."""
        with self._plain():
            self._db.execute("UPDATE runs SET ended = ?, outcome = ? WHERE id = ?", (time.time(), outcome, self.run))
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    @contextlib.contextmanager
    def _plain(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            text = str(error)
            if "full" in text or "I/O" in text:
                remedy = "free some space and run the same command again"
            elif "readonly" in text or "unable to open" in text:
                remedy = "make the folder writable or choose another with --runs DIR"
            else:
                remedy = "delete it (only the history of durations is lost) and run the same command again"
            raise UserError(f"{self.path}: {text}: {remedy}") from error


def events(path: Path) -> list[dict[str, Any]]:
    """Events of the newest run, oldest first."""
    rows = _read(path, "SELECT t, step, digest, state, detail FROM events WHERE run = (SELECT max(id) FROM runs)")
    return [dict(zip(("t", "step", "digest", "state", "detail"), row, strict=True)) for row in rows]


def expected(path: Path, step: str, work: float | None) -> float | None:
    """Seconds that a step will take, from the five newest times that it finished; None when it never did."""
    query = "SELECT seconds, work FROM durations WHERE step = ? AND outcome = 'done' ORDER BY t DESC LIMIT 5"
    rows = _read(path, query, step)
    if work and all(past for _, past in rows):
        seconds = [took / past * work for took, past in rows]
    else:
        seconds = [took for took, _ in rows]
    return statistics.median(seconds) if seconds else None


def _read(path: Path, query: str, *values: Any) -> list[Any]:
    """Rows of a journal that may be missing, damaged, or on a read-only disk: then there is no history."""
    if not path.is_file():
        return []
    for mode in ("mode=ro", "immutable=1"):
        with contextlib.suppress(sqlite3.Error):
            db = sqlite3.connect(f"{path.absolute().as_uri()}?{mode}", uri=True)
            try:
                return db.execute(query, values).fetchall()
            finally:
                db.close()
    return []
