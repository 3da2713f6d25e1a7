"""Publishing and verifying outputs."""

import os
from pathlib import Path

import pytest

from eyas.run import outputs


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A finished output with a file that counts as large."""
    monkeypatch.setattr(outputs, "FULL_DIGEST_BYTES", 3000)
    monkeypatch.setattr(outputs, "PIECE_BYTES", 1000)
    partial = tmp_path / "partial"
    (partial / "deep").mkdir(parents=True)
    (partial / "deep" / "small").write_bytes(b"s" * 3000)
    (partial / "large").write_bytes(bytes(range(250)) * 40)
    (partial / "empty").touch()
    (partial / "link").symlink_to("large")
    (partial / "folder-link").symlink_to("deep")
    outputs.publish(partial, tmp_path / "out", {"rows": 1})
    assert not partial.exists()
    return tmp_path / "out"


def change(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_an_untouched_output_verifies(out: Path) -> None:
    assert outputs.verify(out) is None


@pytest.mark.parametrize("at", [0, 1500, 2999])
def test_any_changed_byte_of_a_small_file_is_found(out: Path, at: int) -> None:
    change(out / "deep" / "small", at)
    assert outputs.verify(out) == "deep/small is damaged"


@pytest.mark.parametrize("at", [0, 999, 9000, 9999])
def test_changed_ends_of_a_large_file_are_found(out: Path, at: int) -> None:
    change(out / "large", at)
    assert outputs.verify(out) == "large is damaged"


def test_what_else_can_be_wrong(out: Path) -> None:
    (out / "empty").unlink()
    assert outputs.verify(out) == "empty is missing"
    (out / "empty").touch()
    (out / "alien").touch()
    assert outputs.verify(out) == "alien does not belong to it"
    (out / "alien").unlink()
    os.truncate(out / "large", 9999)
    assert outputs.verify(out) == "large is damaged"


def test_links(out: Path) -> None:
    (out / "link").unlink()
    (out / "link").symlink_to("nowhere")
    assert outputs.verify(out) == "link is damaged"


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"files": 3}', '{"files": {"large": 3}}'])
def test_a_damaged_list(out: Path, text: str) -> None:
    (out / "outputs.json").write_text(text)
    assert outputs.verify(out) is not None


def test_no_output(tmp_path: Path) -> None:
    assert outputs.verify(tmp_path / "nothing") == "it was never finished"


def test_a_result_that_is_no_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "partial").mkdir()
    with pytest.raises(ValueError, match="JSON"):
        outputs.publish(tmp_path / "partial", tmp_path / "out", {"loss": float("nan")})
    assert not (tmp_path / "out").exists()
