"""Entries of steps that sleep, and of a server that sleeps while it loads: for benchmarks/schedule.py."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from eyas.progress import Progress
from eyas.spec import StepSpec


def work(spec: StepSpec, out: Path, progress: Progress) -> dict[str, Any]:
    """Sleep as long as the step's section says, telling how far it is."""
    (options,) = spec.config.values()
    progress.total(100, "percent")
    for _ in range(100):
        time.sleep(options["sleep"] / 100)
        progress.advance(1)
    return {}


def serve(spec: StepSpec, out: Path, progress: Progress, ready: Callable[[dict[str, Any]], None]) -> None:
    """Answer after the time that its section says."""
    (options,) = spec.config.values()
    time.sleep(options["load"])
    ready({"loaded": True})
    while True:
        time.sleep(60)
