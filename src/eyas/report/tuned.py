"""The plot of `eyas tune`: each setting against the default."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eyas.files import write_atomic
from eyas.report import plots


def write_plot(found: Mapping[str, Any], path: Path) -> bool:
    """Write the SVG, the confirmation's ratio last; False: nothing was measured, and there is none."""
    winner = found["winner"]["name"]
    rows = [
        (row["name"], row["ratio"]["ratio"], row["ratio"]["low"], row["ratio"]["high"], row["name"] == winner)
        for row in found["trials"]
        if row["ratio"]["ratio"] is not None
    ]
    confirmed = found["confirmation"]
    if confirmed and (ratio := confirmed["ratio"])["ratio"] is not None:
        kept = not found["default_kept"]
        rows.append(("confirmed" if kept else "not confirmed", ratio["ratio"], ratio["low"], ratio["high"], kept))
    if rows:
        write_atomic(path, plots.standalone(plots.trials(rows)))
    return bool(rows)
