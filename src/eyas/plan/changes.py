"""Why a step would run: what differs from the last time that it was asked for."""

from pathlib import Path
from typing import Any

from eyas.errors import UserError
from eyas.files import read_json
from eyas.plan.digests import Planned


def why(planned: Planned, home: Path) -> str:
    """A few words; `home` holds the step's folders, one a digest."""
    old = _newest(home)
    if old is None:
        return "first time"
    found = []
    if old.get("code") != planned.code:
        found.append("code")
    found += _fields(old.get("config", {}), planned.config)
    if old.get("outside", {}) != dict(planned.step.outside):
        found.append("outside files")
    before = {name: Path(out).parent.name for name, out in old.get("inputs", {}).items()}
    found += [f"input {name}" for name, digest in planned.inputs.items() if before.get(name) != digest]
    return "changed: " + ", ".join(found or ["seed, entry or services"])


def _newest(home: Path) -> dict[str, Any] | None:
    specs = sorted(home.glob("*/spec.json"), key=lambda path: path.stat().st_mtime)
    try:
        old = read_json(specs[-1]) if specs else None
    except (OSError, UserError):
        return None
    return old if isinstance(old, dict) else None


def _fields(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Fields that differ, as section.field."""
    found = []
    for section in sorted(old.keys() | new.keys()):
        before, after = old.get(section, {}), new.get(section, {})
        keys = sorted(before.keys() | after.keys())
        found += [f"{section}.{key}" for key in keys if before.get(key) != after.get(key)]
    return found
