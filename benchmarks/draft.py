"""A draft trained from a file of a target's own answers, in-process and in minutes on a GPU.

    python benchmarks/draft.py --answers FILE.npz --out DIR [--epochs 6] [--layers 2,15,27]

FILE holds `ids` (all rows one after another, prompt then answer), `plen` and `alen` (tokens of each row's prompt and
answer); the first `--heldout` rows are held out. What the steps of a run do with a store is done here in memory: states
by a prefill, training by eyas' own loop, export, replay. The draft's config names its layers, so that it can be served
with a target that has more of them (benchmarks/speedup.py). Prints the held-out accept length at 3 draft tokens.
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch

from eyas.config import Train
from eyas.decode.replay import pooled, tallies
from eyas.draft import checkpoint, vocabulary
from eyas.draft.config import DraftConfig
from eyas.draft.export import layer_ids
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

DRAFT_TOKENS = 3


def read(path: Path, rows: int | None) -> list[tuple[list[int], int]]:
    """Ids and length of the prompt of each row."""
    file = np.load(path)
    ids, prompt, answer = (file[name] for name in ("ids", "plen", "alen"))
    ends = np.concatenate([[0], np.cumsum(prompt + answer)])
    return [(ids[ends[i] : ends[i + 1]].tolist(), int(prompt[i])) for i in range(len(prompt))][:rows]


def capture(target: InProcessTarget, rows: list[tuple[list[int], int]], dtype: torch.dtype) -> list[Sample]:
    """The rows with the target's states, kept on its device."""
    order = sorted(range(len(rows)), key=lambda i: len(rows[i][0]))
    found: dict[int, Sample] = {}
    for part in group([len(rows[i][0]) for i in order], 32768):
        members = [order[i] for i in part]
        longest = max(len(rows[i][0]) for i in members)
        ids = torch.zeros(len(members), longest, dtype=torch.int64)
        for place, i in enumerate(members):
            ids[place, : len(rows[i][0])] = torch.tensor(rows[i][0])
        out = target.run(ids.to(target.device), target.cache(len(members), longest))
        for place, i in enumerate(members):
            row, prompt = rows[i]
            last = out.last[place, : len(row)].to(dtype).clone()
            aux = out.aux[place, : len(row)].to(dtype).clone()
            mask = torch.arange(len(row)) >= prompt
            greedy = target.greedy(out.last[place, : len(row)]).cpu()
            found[i] = Sample(str(i), torch.tensor(row), mask, aux, last, greedy)
    return [found[i] for i in range(len(rows))]


def main() -> None:
    """Train, export, replay."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--answers", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--target", default="smollm2-135m-instruct")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--layers", default="", help="hidden_states indices; default: EAGLE-3's")
    parser.add_argument("--rows", type=int, default=None)
    parser.add_argument("--heldout", type=int, default=300)
    parser.add_argument("--vocabulary", type=int, default=16384)
    parser.add_argument("--epochs", type=float, default=6.0)
    parser.add_argument("--batch-tokens", type=int, default=8192)
    parser.add_argument("--learning-rate", type=float, default=8e-4)
    parser.add_argument("--ttt-steps", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=1e9, help="of training; the schedule ends then")
    asked = parser.parse_args()
    began = time.monotonic()
    device = torch.device(asked.device)
    info = targets.inspect(asked.target, Silent())
    layers = tuple(map(int, asked.layers.split(","))) if asked.layers else default_layers(info.num_layers)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    rows = read(asked.answers, asked.rows)
    target = InProcessTarget(info, layers, dtype, device)
    samples = capture(target, rows, dtype)
    del target
    heldout, train = samples[: asked.heldout], samples[asked.heldout :]
    print(f"captured {sum(len(s.ids) for s in samples)} tokens after {time.monotonic() - began:.0f} s", flush=True)
    counts = torch.zeros(info.vocab_size, dtype=torch.int64)
    for sample in train:
        counts += torch.bincount(sample.ids[sample.answer], minlength=info.vocab_size)
    known = vocabulary.choose(counts, asked.vocabulary)
    config = DraftConfig.from_target(info.config, len(known))
    draft = DraftModel(config, torch.nn.Embedding.from_pretrained(weights.embedding(info.folder).float()))
    draft.set_vocabulary(known)
    draft = draft.to(device)
    begin(draft, info, "fitted", 0, len(train), train.__getitem__)
    settings = Train(
        ttt_steps=asked.ttt_steps, epochs=asked.epochs, batch_tokens=asked.batch_tokens,
        learning_rate=asked.learning_rate,
    )  # fmt: skip
    lengths = [len(sample.ids) for sample in train]
    batches = plan(lengths, settings.batch_tokens, settings.epochs, 0)
    head = weights.head(info.folder)[known].float().to(device)
    # The first steps tell how many fit into the time, so that the schedule ends where the time does.
    trainer = Trainer(draft, head, settings, len(batches), dtype, compile=False)
    first, told = time.monotonic(), 0
    for number, batch in enumerate(batches):
        if number >= trainer.steps:
            break
        trainer.step(pack([train[i] for i in batch], asked.ttt_steps, device, dtype))
        if number == 20:
            first = time.monotonic()
        if number == 60:
            pace = (time.monotonic() - first) / 40
            trainer.steps = min(len(batches), 60 + int((asked.seconds - 60 * pace) / pace))
        told += sum(lengths[i] for i in batch)
        if number % 100 == 0:
            print(f"step {number} of {trainer.steps}, loss {trainer.loss}", flush=True)
    seconds = time.monotonic() - first
    print(f"trained on {told} tokens after {time.monotonic() - began:.0f} s, {told / seconds:.0f} tokens/s", flush=True)
    asked.out.mkdir(parents=True, exist_ok=True)
    eagle = config.to_hf("bfloat16")["eagle_config"]
    # As if for a target with more layers: then the default would be another one.
    extra = layer_ids(eagle, layers, info.architecture, info.num_layers * 10)
    checkpoint.save(asked.out, draft, torch.bfloat16, extra)
    draft.eval()
    walks = []
    for part in group([len(s.ids) for s in heldout], 8192):
        members = [heldout[i] for i in part]
        found = tallies(draft, members, DRAFT_TOKENS)
        walks += [(s.ids[s.answer].tolist(), tally) for s, tally in zip(members, found, strict=True)]
    figures = pooled(walks, DRAFT_TOKENS)
    report = {"tokens": told, "seconds": seconds, "steps": trainer.number, "layers": list(layers), **figures}
    (asked.out / "draft.json").write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
