"""The journal and what is learned from it."""

from pathlib import Path

import pytest

from eyas.errors import UserError
from eyas.run.folder import RunFolder
from eyas.run.journal import Journal, events


def test_events_of_the_newest_run(tmp_path: Path) -> None:
    path = tmp_path / "j"
    first = Journal(path, 1, "here")
    first.event("train", "d", "running")
    first.end("stopped")
    second = Journal(path, 2, "here")
    second.event("train", "d", "finished", "reused")
    assert [(event["state"], event["detail"]) for event in events(path)] == [("finished", "reused")]
    second.close()


def test_a_damaged_journal_is_no_history(tmp_path: Path) -> None:
    (tmp_path / "j").write_bytes(b"nonsense" * 100)
    assert events(tmp_path / "j") == []
    with pytest.raises(UserError, match="not a database"):
        Journal(tmp_path / "j", 1, "here")


def test_history_on_a_read_only_disk(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j", 1, "here")
    journal.event("train", "d", "running")
    journal.close()
    tmp_path.chmod(0o555)
    assert len(events(tmp_path / "j")) == 1
    tmp_path.chmod(0o755)


def test_no_run_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is no run folder"):
        RunFolder(tmp_path).steps()
