"""What a draft is worth by the tokens it was trained on, and what made the difference: one change at a time.

    python benchmarks/quality.py --answers FILE.npz --out DIR --runs base@1.9,muon@1.9,...

Rows and held-out rows as in benchmarks/draft.py. Each run is a variant at a number of tokens (in millions), where its
learning rate ends, replayed on the held-out rows at 3 draft tokens. Prints a line a run, and writes all into
DIR/quality-NAME.json after each. A small draft leaves most of a GPU idle: several processes, each with some runs,
share it well.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from draft import DRAFT_TOKENS, capture, read

from eyas.config import Train
from eyas.decode.replay import pooled, tallies
from eyas.draft import start, vocabulary
from eyas.draft.config import DraftConfig
from eyas.draft.model import DraftModel
from eyas.engines import target as targets
from eyas.engines import weights
from eyas.engines.inprocess.target import InProcessTarget
from eyas.engines.layers import default_layers
from eyas.progress import Silent
from eyas.store.shard import Sample
from eyas.train.loop import Trainer
from eyas.train.packing import group, pack, plan
from eyas.train.step import begin

BASE: dict[str, Any] = {"ttt_steps": 3, "batch_tokens": 2048, "learning_rate": 8e-4}
VARIANTS: dict[str, dict[str, Any]] = {
    "base": {},
    "before": {"batch_tokens": 8192},
    "random": {"start": "random"},
    "positions": {"positions": 131072},
    "lr2": {"learning_rate": 2e-3},
    "muon": {"optimizer": "muon", "learning_rate": 1e-3},
    "muon2": {"optimizer": "muon", "learning_rate": 2e-3},
    "muon4": {"optimizer": "muon", "learning_rate": 4e-3},
    "muon-1024": {"optimizer": "muon", "learning_rate": 2e-3, "batch_tokens": 1024},
    "muon-4096": {"optimizer": "muon", "learning_rate": 2e-3, "batch_tokens": 4096},
    "muon-random": {"optimizer": "muon", "learning_rate": 2e-3, "start": "random"},
    "muon-positions": {"optimizer": "muon", "learning_rate": 2e-3, "positions": 131072},
    "muon-cool": {"optimizer": "muon", "learning_rate": 2e-3, "temperature": 0.7},
    "muon-cold": {"optimizer": "muon", "learning_rate": 2e-3, "temperature": 0.4},
    "muon-ttt5": {"optimizer": "muon", "learning_rate": 2e-3, "ttt_steps": 5},
    "muon-flat": {"optimizer": "muon", "learning_rate": 2e-3, "step_decay": 1.0},
    "muon-decay": {"optimizer": "muon", "learning_rate": 2e-3, "weight_decay": 0.1},
}


class Bench:
    """A target's rows with their states, and the drafts trained on them."""

    def __init__(self, asked: argparse.Namespace) -> None:
        self.device = torch.device(asked.device)
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.info = targets.inspect(asked.target, Silent())
        rows = read(asked.answers, asked.rows)
        target = InProcessTarget(self.info, default_layers(self.info.num_layers), self.dtype, self.device)
        samples = capture(target, rows, self.dtype)
        self.heldout, self.train = samples[: asked.heldout], samples[asked.heldout :]
        counts = torch.zeros(self.info.vocab_size, dtype=torch.int64)
        for sample in self.train:
            counts += torch.bincount(sample.ids[sample.answer], minlength=self.info.vocab_size)
        self.known = vocabulary.choose(counts, asked.vocabulary)
        self.embedding = weights.embedding(self.info.folder).float()
        self.head = weights.head(self.info.folder)[self.known].float().to(self.device)

    def run(self, tokens: float, asked: dict[str, Any]) -> dict[str, Any]:
        """Train one draft on about `tokens` tokens and replay it."""
        settings = BASE | asked
        how, positions = settings.pop("start", "fitted"), settings.pop("positions", 16384)
        lengths = [len(sample.ids) for sample in self.train]
        config = Train(**settings, epochs=tokens / sum(lengths))
        shape = DraftConfig.from_target(self.info.config, len(self.known))
        draft = DraftModel(shape, torch.nn.Embedding.from_pretrained(self.embedding.clone()))
        draft.set_vocabulary(self.known)
        draft = draft.to(self.device)
        start.MOST = positions
        began = time.monotonic()
        begin(draft, self.info, how, 0, len(self.train), self.train.__getitem__)
        before, fitted = self.accept(draft), time.monotonic() - began
        batches = plan(lengths, config.batch_tokens, config.epochs, 0)
        trainer = Trainer(draft, self.head, config, len(batches), self.dtype, compile=False)
        began = time.monotonic()
        for batch in batches:
            trainer.step(pack([self.train[i] for i in batch], config.ttt_steps, self.device, self.dtype))
        seconds, seen = time.monotonic() - began, sum(lengths[i] for batch in batches for i in batch)
        return {
            "tokens": seen, "steps": len(batches), "seconds": seconds, "tokens_per_second": seen / seconds,
            "start_seconds": fitted, "before": before, "loss": trainer.loss, **self.accept(draft),
        }  # fmt: skip

    def accept(self, draft: DraftModel) -> dict[str, float]:
        """Held-out accept length without the answers that loop, and of all."""
        walks: list[tuple[list[int], Any]] = []
        for part in group([len(s.ids) for s in self.heldout], 8192):
            members: list[Sample] = [self.heldout[i] for i in part]
            found = tallies(draft, members, DRAFT_TOKENS)
            walks += [(s.ids[s.answer].tolist(), tally) for s, tally in zip(members, found, strict=True)]
        figures = pooled(walks, DRAFT_TOKENS)
        rounds = figures["rounds"] + figures["looping"]["rounds"]
        lengths = figures["accept_length"] * figures["rounds"]
        lengths += figures["looping"]["accept_length"] * figures["looping"]["rounds"]
        return {"accept_length": figures["accept_length"], "all": lengths / rounds}


def main() -> None:
    """Each variant at each number of tokens."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--answers", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--target", default="smollm2-135m-instruct")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rows", type=int, default=None)
    parser.add_argument("--heldout", type=int, default=300)
    parser.add_argument("--vocabulary", type=int, default=16384)
    parser.add_argument("--runs", default=",".join(f"{name}@1.9" for name in VARIANTS))
    parser.add_argument("--name", default="all")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no run after these")
    asked = parser.parse_args()
    began = time.monotonic()
    bench = Bench(asked)
    print(f"captured after {time.monotonic() - began:.0f} s", flush=True)
    asked.out.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    for run in asked.runs.split(","):
        if time.monotonic() - began > asked.seconds:
            return
        name, _, tokens = run.partition("@")
        found = bench.run(float(tokens) * 1e6, VARIANTS[name])
        rows.append({"variant": name, **BASE, **VARIANTS[name], **found})
        print(json.dumps(rows[-1]), flush=True)
        (asked.out / f"quality-{asked.name}.json").write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
