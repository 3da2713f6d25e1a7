"""`eyas tune` on this machine: tuned against default, the trials, and the loads that they took against a grid's.

    python benchmarks/tune.py --name h200 [--times 10] [A.B=VALUE]...

The target is SmolLM2-135M, with `--times N` made dear by layers that change no token (eyas.engines.dear). A.B=VALUE are
fields of the run file, as tune.goal=latency+throughput@16 or server.tp=2. Called again it goes on where it was. Writes
benchmarks/results/DATE-tune-NAME.json.
"""

import argparse
import datetime
import subprocess
import sys
import time
from pathlib import Path

import torch
import yaml

from eyas import config
from eyas.bench.tune import tune
from eyas.engines import dear
from eyas.engines import target as targets
from eyas.files import write_json
from eyas.progress import Silent
from eyas.ui.single import Lines


def main() -> None:
    """Tune, and write what came of it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--name", required=True)
    parser.add_argument("--times", type=int, default=1)
    parser.add_argument("--work", type=Path, default=Path("/dev/shm/eyas-tune"))
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("fields", nargs="*", help="of the run file, as A.B=VALUE")
    asked = parser.parse_args()
    asked.work.mkdir(parents=True, exist_ok=True)
    model = targets.inspect("smollm2-135m-instruct", Silent()).folder
    if asked.times > 1:
        model = dear.make(model, asked.work / f"times{asked.times}", asked.times)
    said = {
        "name": "tune",
        "target": {"model": str(model), "dtype": "bfloat16"},
        "engine": {"kind": "sglang"},
        "server": {"python": sys.executable},
    }
    runfile = asked.work / "run.yaml"
    runfile.write_text(yaml.safe_dump(said))
    loaded = config.load(runfile, asked.fields)
    began = time.monotonic()
    found = tune.run(loaded, asked.work / "tune", Lines())
    rows = [found["default"] or {}, *found["trials"]]
    # The command has the places of this machine in it.
    del found["launch"]
    asked.out.mkdir(parents=True, exist_ok=True)
    written = {
        "date": datetime.date.today().isoformat(),
        "commit": subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "what": {"times": asked.times, "fields": asked.fields},
        "seconds": round(time.monotonic() - began, 1),
        "seconds_of_trials": round(sum(row.get("seconds") or 0 for row in rows), 1),
        **found,
    }
    write_json(asked.out / f"{written['date']}-tune-{asked.name}.json", written)


if __name__ == "__main__":
    main()
