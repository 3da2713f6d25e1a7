"""The journal of a run folder: every change of state in order.

A folder is the truth, the journal is its history. Each entry is durable before the runner acts on it. How long steps
take is kept for all runs of a user together (`plan/durations.py`).
"""

import contextlib
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from eyas.errors import UserError

SCHEMA = """
CREATE TABLE IF NOT EXISTS runs (id INTEGER PRIMARY KEY, t REAL, pid INTEGER, host TEXT, ended REAL, outcome TEXT);
CREATE TABLE IF NOT EXISTS events (run INTEGER, t REAL, step TEXT, digest TEXT, state TEXT, detail TEXT);
"""


class Journal:
    """Writes the journal. Raises UserError: disk full, read-only folder, damaged file."""

    def __init__(self, path: Path, pid: int, host: str) -> None:
        self.path = path
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
                remedy = "delete it (only its history is lost) and run the same command again"
            raise UserError(f"{self.path}: {text}: {remedy}") from error


def events(path: Path) -> list[dict[str, Any]]:
    """Events of the newest run, oldest first."""
    rows = _read(path, "SELECT t, step, digest, state, detail FROM events WHERE run = (SELECT max(id) FROM runs)")
    return [dict(zip(("t", "step", "digest", "state", "detail"), row, strict=True)) for row in rows]


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
