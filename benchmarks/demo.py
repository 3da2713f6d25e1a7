"""Writes down a finished demo, and what the machine can do, as benchmarks/results/DATE-NAME.json.

    python benchmarks/demo.py runs/demo [--name demo]

The ceilings are measured here: a float32 and a bfloat16 matrix product and a copy. The floor that answering is
compared with follows from them: operations a token over the measured rate.
"""

import argparse
import datetime
import json
import os
import platform
import subprocess
import time
from pathlib import Path

import torch


def rate(dtype: torch.dtype, width: int) -> float:
    """Measured operations a second of a product of square matrices."""
    a, b = torch.randn(width, width).to(dtype), torch.randn(width, width).to(dtype)
    best = 0.0
    for _ in range(5):
        began = time.perf_counter()
        torch.mm(a, b)
        best = max(best, 2 * width**3 / (time.perf_counter() - began))
    return best


def copy_rate() -> float:
    """Bytes a second, read and written, of a large copy."""
    source = torch.randn(1 << 26)
    target = torch.empty_like(source)
    best = 0.0
    for _ in range(5):
        began = time.perf_counter()
        target.copy_(source)
        best = max(best, 2 * source.nbytes / (time.perf_counter() - began))
    return best


def result(run: Path, step: str) -> dict:
    """result.json of the newest finished output of a step."""
    return json.loads(max((run / "steps" / step).glob("*/out/result.json"), key=os.path.getmtime).read_text())


def main() -> None:
    """Collect and write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=Path)
    parser.add_argument("--name", default="demo")
    arguments = parser.parse_args()
    run = arguments.run
    verdict = json.loads((run / "verdict.json").read_text())
    answers, train = result(run, "answers"), result(run, "train")
    decode, replay = result(run, "decode"), result(run, "replay")
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    flops = rate(torch.float32, 2048)
    generated = answers["tokens"] + answers["heldout_tokens"]
    written = {
        "date": datetime.date.today().isoformat(),
        "commit": commit,
        "device": {"processor": platform.processor() or platform.machine(), "cores": len(os.sched_getaffinity(0))},
        "ceilings": {
            "float32_flops": flops,
            "bfloat16_flops": rate(torch.bfloat16, 512),
            "copy_bytes_per_second": copy_rate(),
        },
        "seconds": verdict["seconds"],
        "total_seconds": sum(verdict["seconds"].values()),
        "answers": {
            "tokens": generated,
            "tokens_per_second": generated / verdict["seconds"]["answers"],
            "floor_tokens_per_second": flops / 269e6,
        },
        "training": {
            "tokens": train["tokens"],
            "tokens_per_second": train["tokens_per_second"],
            "digest": train["digest"],
        },
        "accept_length": {
            "replayed_on_all_heldout": replay["accept_length"],
            "predicted": decode["predicted"]["accept_length"],
            "decoded": decode["accept_length"],
        },
        "lossless": decode["lossless"],
        "speedup": decode["speedup"],
        "versions": verdict["versions"],
    }
    path = Path(__file__).parent / "results" / f"{written['date']}-{arguments.name}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(written, indent=1) + "\n")
    print(path)


if __name__ == "__main__":
    main()
