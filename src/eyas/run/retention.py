"""How long captured states are kept: half a terabyte is not left lying about.

States are the safetensors files of the steps that capture (`HOLDERS`). Deleting them leaves the run's figures, drafts
and report as they are: a step whose readers are all finished is not run again. One that is to run again then captures
again.
"""

import contextlib
import time
from pathlib import Path
from typing import Any

from eyas.errors import UserError
from eyas.files import fsync_folder
from eyas.run import lock
from eyas.run.folder import RunFolder, read_or_empty

HOLDERS = ("answers", "capture", "pilot-answers", "pilot-capture")
"""Steps whose outputs hold states; of the in-process engine, the answers' are those of the capture by hard link."""
DAY = 86400.0


def states(folder: Path) -> list[Path]:
    """The files of states in a run folder, finished or in progress, and the manifests of their stores."""
    found = []
    for holder in HOLDERS:
        step = folder / "steps" / holder
        for pattern in ("*/out/*/*.safetensors", "*/partial/**/*.safetensors", "*/partial/**/*.partial"):
            found += [path for path in step.glob(pattern) if path.is_file()]
    return found


def taken(folder: Path) -> dict[str, int]:
    """Bytes that states take on the disk, by step; what two steps share counts with the first."""
    seen: set[tuple[int, int]] = set()
    sizes: dict[str, int] = {}
    for path in states(folder):
        with contextlib.suppress(OSError):
            about = path.stat()
            if (about.st_dev, about.st_ino) not in seen:
                seen.add((about.st_dev, about.st_ino))
                step = path.relative_to(folder).parts[1]
                sizes[step] = sizes.get(step, 0) + about.st_blocks * 512
    return sizes


def release(folder: Path) -> int:
    """Delete the states of a run that no runner owns; returns the bytes that are free now. Raises UserError."""
    with lock.hold(folder):
        return _release(folder)


def after_success(run: RunFolder, resolved: dict[str, Any]) -> str | None:
    """What `store.keep` asks for when a run has succeeded; the caller owns the folder. Returns what was done."""
    if resolved.get("store", {}).get("keep") == "until_verified" and (freed := _release(run.path)):
        return f"states deleted ({freed >> 20} MiB), as store.keep says: what needs them again captures again"
    return None


def expire(runs: Path) -> list[str]:
    """Delete the states of all runs in `runs` that were kept for a number of days, which are over, and that nobody
    runs. Returns what was done. Called at every `eyas run`; there is no process that waits for the day."""
    notes = []
    for journal in runs.glob("*/verdict.json"):
        folder = journal.parent
        with contextlib.suppress(OSError, UserError):
            keep = _kept_for(folder)
            if keep is not None and time.time() - journal.stat().st_mtime > keep * DAY and (freed := release(folder)):
                notes.append(f"{folder}: states deleted ({freed >> 20} MiB), {keep:g} days are over (store.keep)")
    return notes


def _kept_for(folder: Path) -> float | None:
    """Days for which a finished run's states are kept; None: no number of days."""
    import yaml

    try:
        keep = yaml.safe_load((folder / "run.yaml").read_text(encoding="utf-8"))["store"]["keep"]
    except (yaml.YAMLError, UnicodeDecodeError, KeyError, TypeError):
        return None  # damaged, or of a version that kept everything
    finished = "accept_length" in read_or_empty(folder / "verdict.json")
    return float(keep) if finished and isinstance(keep, int) and not isinstance(keep, bool) else None


def _release(folder: Path) -> int:
    freed = sum(taken(folder).values())
    found = states(folder)
    stores = {path.parent for path in found if (path.parent / "manifest.json").is_file()}
    for store in stores:  # first: without one it is no store
        (store / "manifest.json").unlink()
        fsync_folder(store)
    for path in found:
        path.unlink(missing_ok=True)
    return freed
