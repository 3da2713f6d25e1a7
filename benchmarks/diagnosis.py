"""Is a fault of serving named? Each is planted in real decoding with a trained draft, and diagnosed.

    python benchmarks/diagnosis.py DRAFT --name cpu [--target smollm2-135m-instruct] [--prompts 12] [--tokens 48]

Decoding with the fault gives what a server with it would count, answer by answer and pooled; the diagnosis knows the
draft as it should be, and those counts alone. Held-out built-in prompts, three draft tokens a step, float32.
"""

import argparse
import datetime
import json
import os
import platform
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from eyas.bench.diagnose import diagnose
from eyas.bench.evidence import answered, observed
from eyas.bench.variants import OWN, all_of, of_layers
from eyas.corpus.read import read
from eyas.corpus.render import Renderer
from eyas.decode.chain import decode
from eyas.decode.replay import load_draft
from eyas.draft.model import DraftModel
from eyas.draft.rotary import frequencies
from eyas.engines import target as targets
from eyas.engines import weights
from eyas.engines.inprocess.target import InProcessTarget, Pass
from eyas.engines.layers import default_layers
from eyas.progress import Silent

CPU, DRAFT_TOKENS = torch.device("cpu"), 3
Layers = tuple[int, int, int]


class LastState(InProcessTarget):
    """As under EAGLE: what the draft is handed is the last state."""

    def run(self, ids: torch.Tensor, cache: Any) -> Pass:
        """See `InProcessTarget`."""
        out = super().run(ids, cache)
        return Pass(out.last, torch.cat([out.last] * 3, -1))


def faults(info: targets.TargetInfo, layers: Layers) -> dict[str, tuple[str | None, Callable[[DraftModel], None], Any]]:
    """By name: the cause that has to be found, what becomes of the draft, the target that serves."""

    def theta(value: float) -> Callable[[DraftModel], None]:
        def change(draft: DraftModel) -> None:
            rope = {**draft.config.rope_parameters, "rope_theta": value}
            inverse, _ = frequencies(rope, draft.config.head_dim, draft.config.max_position_embeddings)
            draft.inverse_frequencies.copy_(inverse)

        return change

    def no_map(draft: DraftModel) -> None:
        draft.d2t.zero_()

    def no_head(draft: DraftModel) -> None:
        draft.lm_head.weight.data = torch.randn(draft.lm_head.weight.shape, generator=torch.Generator().manual_seed(7))

    def targets_head(draft: DraftModel) -> None:
        draft.lm_head.weight.data = weights.head(info.folder)[draft.target_ids].float()

    def eagle(draft: DraftModel) -> None:
        size = draft.config.hidden_size
        draft.fc.weight.data.zero_()
        draft.fc.weight.data[:, :size] = torch.eye(size)
        draft.lm_head.weight.data = weights.head(info.folder)[: draft.config.draft_vocab_size].float()
        no_map(draft)

    def nothing(draft: DraftModel) -> None: ...

    def taking(*ids: int) -> InProcessTarget:
        return InProcessTarget(info, ids, torch.float32, CPU)

    own = taking(*layers)
    low, mid, high = layers
    return {
        "none": (None, nothing, own),
        "one layer late": ("layers", nothing, taking(low + 1, mid + 1, high + 1)),
        "one layer early": ("layers", nothing, taking(low - 1, mid - 1, high - 1)),
        "the highest layer one late": ("layers", nothing, taking(low, mid, high + 1)),
        "rope_theta 10000": ("rope_theta", theta(10000.0), own),
        "no vocabulary map": ("vocabulary_map", no_map, own),
        "a random head": ("head", no_head, own),
        "the target's head": ("head", targets_head, own),
        "EAGLE": ("eagle", eagle, LastState(info, layers, torch.float32, CPU)),
    }


def main() -> None:
    """Plant each fault, diagnose it, write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("draft", type=Path)
    parser.add_argument("--name", required=True)
    parser.add_argument("--target", default="smollm2-135m-instruct")
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=48)
    asked = parser.parse_args()
    info = targets.inspect(asked.target, Silent())
    layers = default_layers(info.num_layers)
    others = {layer for variant in of_layers(layers, info.num_layers, False) for layer in variant.layers}
    loaded = InProcessTarget(info, tuple(sorted({*layers, *others})), torch.float32, CPU)
    render = Renderer(info, {})
    prompts = [render(row) for row in read("builtin", "heldout", asked.prompts)[0]]
    rows = answered(loaded, prompts, asked.tokens)
    good = load_draft(asked.draft, info, torch.float32, CPU)
    found = []
    for name, (cause, change, server) in faults(info, layers).items():
        served = load_draft(asked.draft, info, torch.float32, CPU)
        change(served)
        begun = time.perf_counter()
        done = decode(server, served, [row.ids[: row.prompt] for row in rows], asked.tokens, DRAFT_TOKENS)
        seen = [replace(row, served=one.tally) for row, one in zip(rows, done, strict=True)]
        figures = observed(seen, DRAFT_TOKENS)
        variants = list(all_of(good, info, layers, False, 0))
        decoded = time.perf_counter() - begun
        row: dict[str, Any] = {"fault": name, "cause": cause, "accept_length": figures["accept_length"]}
        for how, known in (("by_answer", seen), ("pooled", rows)):
            told = diagnose(good, layers, variants, {OWN: known}, figures, DRAFT_TOKENS, Silent())
            row[how] = {key: told[key] for key in ("cause", "variant", "rivals")}
            row[how]["distances"] = sorted(round(trial["distance"], 4) for trial in told["trials"])[:3]
        row["seconds"] = {"decode": decoded, "diagnose": (time.perf_counter() - begun - decoded) / 2}
        print(json.dumps(row), flush=True)
        found.append(row)
    folder = Path(__file__).parent
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True).stdout.strip()
    result = {
        "commit": commit,
        "device": f"{len(os.sched_getaffinity(0))} cores, {platform.machine()}, busy with other work too",
        "torch": torch.__version__,
        "target": asked.target,
        "prompts": len(rows),
        "tokens": sum(len(row.answer) for row in rows),
        "faults": found,
    }
    path = folder / "results" / f"{datetime.date.today()}-diagnosis-{asked.name}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(path)


if __name__ == "__main__":
    main()
