"""On what a run runs: what its durations depend on."""

import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.run import process


@dataclass(frozen=True)
class Machine:
    """Host, its devices, and the model that is run on them."""

    host: str
    boot: str
    device: str
    """`2 x NVIDIA H200`, or `cpu x 8`."""
    model: str


def machine(resolved: dict[str, Any]) -> Machine:
    """This machine, for a resolved run file. Nothing of a GPU library is asked."""
    engine, target = resolved.get("engine", {}), resolved.get("target", {})
    device = f"cpu x {os.cpu_count()}"
    if engine.get("device") != "cpu" and (gpus := _gpus()):
        device = f"{len(gpus)} x {gpus[0]}"
    return Machine(socket.gethostname(), process.boot(), device, str(target.get("model", "")))


def _gpus() -> list[str]:
    """Names of the NVIDIA GPUs that the driver shows, those of CUDA_VISIBLE_DEVICES."""
    names = []
    for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        text = path.read_text(errors="replace")
        names += [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("Model")]
    asked = os.environ.get("CUDA_VISIBLE_DEVICES")
    return names if asked is None else names[: len([one for one in asked.split(",") if one.strip()])]
