"""What became of each line of data, by its content; and which samples were there already. Both lie on the disk.

A line's key covers its bytes and all that decides what becomes of it (tokenizer, template and its variables, longest
length), so that nothing is ever out of date: another template finds none of the old rows, an added file adds its own.
"""

import sqlite3
from collections.abc import Iterable, Sequence
from pathlib import Path

from eyas.errors import UserError

ASKED = 500
"""Keys in one question."""


class Cache:
    """`key -> what became of the line`, in one SQLite file; one writer, any number of readers beside it."""

    def __init__(self, path: Path, write: bool) -> None:
        self._path = path
        try:
            self._db = sqlite3.connect(path if write else f"file:{path}?mode=ro", uri=not write, timeout=60)
            if write:
                self._db.execute("PRAGMA journal_mode=WAL")
                self._db.execute("PRAGMA synchronous=NORMAL")
                self._db.execute(
                    "CREATE TABLE IF NOT EXISTS lines (id INTEGER PRIMARY KEY, key BLOB NOT NULL UNIQUE, data BLOB)"
                )
            self.empty = self._db.execute("SELECT 1 FROM lines LIMIT 1").fetchone() is None
        except sqlite3.DatabaseError as error:
            raise UserError(f"{path}: damaged or in use ({error}); delete it: it is made again") from error

    def find(self, keys: Sequence[bytes]) -> dict[bytes, bytes]:
        """Those that are known."""
        if self.empty:
            return {}
        found: dict[bytes, bytes] = {}
        for some in _parts(keys):
            marks = ",".join("?" * len(some))
            found |= self._db.execute(f"SELECT key, data FROM lines WHERE key IN ({marks})", some)
        return found

    def add(self, lines: Iterable[tuple[bytes, bytes]]) -> None:
        """Keep these; they survive whatever ends this process afterwards."""
        with self._db:
            self._db.executemany("INSERT OR IGNORE INTO lines (key, data) VALUES (?, ?)", lines)

    def close(self) -> None:
        """Close it."""
        self._db.close()


class Seen:
    """Keys met so far, in a temporary file: a million of them would not be small in memory."""

    def __init__(self) -> None:
        self._db = sqlite3.connect("", isolation_level=None)
        self._db.execute("CREATE TABLE seen (key BLOB PRIMARY KEY) WITHOUT ROWID")
        self._db.execute("BEGIN")

    def new(self, keys: Sequence[bytes]) -> set[bytes]:
        """Those that were not met before; from now on they are met."""
        fresh = set(keys)
        for some in _parts(keys):
            marks = ",".join("?" * len(some))
            fresh.difference_update(
                key for (key,) in self._db.execute(f"SELECT key FROM seen WHERE key IN ({marks})", some)
            )
        self._db.executemany("INSERT INTO seen VALUES (?)", ((key,) for key in fresh))
        return fresh

    def close(self) -> None:
        """Forget them."""
        self._db.close()


def _parts(keys: Sequence[bytes]) -> Iterable[Sequence[bytes]]:
    return (keys[start : start + ASKED] for start in range(0, len(keys), ASKED))
