"""Many samples of the demo's size through one SGLang run: how many came through, how long each step took.

    python benchmarks/many.py --name h200 [--prompts 10000] [--work DIR] [SERVER_FLAG=VALUE]...

Prompts are the built-in ones with different endings. Needs a GPU and an interpreter that has eyas and SGLang.
"""

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import torch
import yaml

from eyas.corpus import builtin

ENDINGS = (
    "", " Answer in one sentence.", " Explain it to a child.", " Use a list.", " Be formal.", " Give an example.",
    " Keep it short.", " Say why.", " Be funny.", " Name three points.",
)  # fmt: skip


def result(run: Path, step: str) -> dict:
    """result.json of a step's newest finished output; empty without one."""
    found = sorted((run / "steps" / step).glob("*/out/result.json"), key=os.path.getmtime)
    return json.loads(found[-1].read_text()) if found else {}


def main() -> None:
    """Run and write benchmarks/results/DATE-many-NAME.json."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--name", required=True)
    parser.add_argument("--prompts", type=int, default=10_000)
    parser.add_argument("--tokens", type=int, default=96, help="longest answer")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--work", type=Path, default=Path("/tmp/eyas-many"))
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("flags", nargs="*", help="flags of the server as NAME=VALUE")
    asked = parser.parse_args()
    texts = [prompt.text + ending for ending in ENDINGS for prompt in builtin.load("train")][: asked.prompts]
    assert len(set(texts)) == asked.prompts, "not so many different prompts"
    asked.work.mkdir(parents=True, exist_ok=True)
    prompts = asked.work / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    config = {
        "name": "many",
        "target": {"model": "smollm2-135m-instruct", "dtype": asked.dtype},
        "engine": {"kind": "sglang"},
        "server": {
            "python": sys.executable,
            "concurrency": 256,
            "args": {name: yaml.safe_load(value) for name, _, value in (flag.partition("=") for flag in asked.flags)},
        },
        "prompts": {"train": str(prompts), "heldout_limit": 100},
        "answers": {"max_new_tokens": asked.tokens},
        "draft": {"vocab_size": 8192},
        "train": {"ttt_steps": 3, "epochs": 1.0, "batch_tokens": 4096, "learning_rate": 5e-4, "checkpoints": 2,
                  "evaluations": 2},
        "decode": {"timing_prompts": 8},
    }  # fmt: skip
    runfile = asked.work / "run.yaml"
    runfile.write_text(yaml.safe_dump(config))
    runs = asked.work / "runs"
    code = subprocess.run([sys.executable, "-m", "eyas", "run", runfile, "--runs", runs, "--plain"]).returncode
    run = runs / "many"
    verdict = json.loads((run / "verdict.json").read_text())
    capture, answers = result(run, "capture"), result(run, "answers")
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    written = {
        "date": datetime.date.today().isoformat(),
        "commit": commit,
        "device": {"name": device, "cores": len(os.sched_getaffinity(0))},
        "exit_code": code,
        "asked": asked.prompts,
        "seconds": verdict["seconds"],
        "versions": verdict["versions"],
        "answers": answers,
        "capture": capture,
        "verdict": {key: verdict.get(key) for key in ("accept_length", "speedup", "lossless", "deploy", "reasons")},
    }
    asked.out.mkdir(parents=True, exist_ok=True)
    path = asked.out / f"{written['date']}-many-{asked.name}.json"
    path.write_text(json.dumps(written, indent=1) + "\n")
    print(path)


if __name__ == "__main__":
    main()
