"""What the arithmetic runs on: device, dtype, threads."""

import os
from pathlib import Path

import torch

from eyas.config import Engine
from eyas.errors import UserError


def use_threads(engine: Engine) -> None:
    """Take the processor's cores as the run file says; by default all that this process, or its container, may use."""
    torch.set_num_threads(engine.threads or usable_cores())


def usable_cores(quota: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Cores by affinity, or by the control group's quota where that is less."""
    cores = len(os.sched_getaffinity(0))
    try:
        allowed, period = quota.read_text(encoding="ascii").split()
        return max(1, min(cores, int(allowed) // int(period)))
    except (OSError, ValueError):
        return cores


def pick_device(engine: Engine) -> torch.device:
    """The device of the run file's engine. Raises UserError where CUDA is asked for and missing."""
    if engine.device == "cuda" and not torch.cuda.is_available():
        raise UserError("engine.device is cuda, but torch sees no CUDA device: use auto or cpu")
    return torch.device("cuda" if engine.device != "cpu" and torch.cuda.is_available() else "cpu")


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype that the run file names; auto is bfloat16 where the processor multiplies it natively."""
    if name != "auto":
        return torch.float32 if name == "float32" else torch.bfloat16
    return torch.bfloat16 if device.type == "cuda" or native_bfloat16() else torch.float32


def native_bfloat16() -> bool:
    """Does this processor multiply bfloat16 in hardware (AVX512-BF16 or AMX)? Elsewhere it is several times slower."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return False
    flags = next((line.split() for line in lines if line.startswith("flags")), [])
    return "avx512_bf16" in flags or "amx_bf16" in flags
