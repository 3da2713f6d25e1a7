"""What `eyas diagnose` found: the table of what was tried, what fits, and how to mend it."""

import textwrap
from collections.abc import Mapping
from typing import Any

from eyas.run.protocol import printable

WIDTH = 110


def as_text(found: Mapping[str, Any]) -> str:
    """`bench/diagnose.py`'s result for people; the variant that fits is marked."""
    trials = found["trials"]
    served = found.get("served") is not None
    lines = [f"   accept length  {'distance  ' if served else ''}variant"]
    for trial in trials:
        mark = "→" if trial["label"] == found["variant"] else " "
        apart = f"{trial['distance']:8.3f}  " if served else ""
        label = f"{trial['cause']}: {trial['label']}" if trial["cause"] else trial["label"]
        lines.append(f"{mark}  {trial['accept_length']:13.2f}  {apart}{printable(label)}")
    if found.get("files"):
        lines += ["", "The draft's files (eyas verify):"]
        lines += [f"  {check['name']}: {printable(check['detail'])}" for check in found["files"]]
    lines += ["", *textwrap.wrap(printable(found["sentence"], 2000), WIDTH)]
    if found["cause"]:
        lines += [f"Cause: {found['cause']}", *textwrap.wrap(f"→ {printable(found['remedy'], 2000)}", WIDTH)]
    return "\n".join(lines)
