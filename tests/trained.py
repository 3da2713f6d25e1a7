"""A draft that was really trained, in seconds: it knows the answers of a tiny random target by heart.

Its accept length on them is above 2, so that a planted fault shows, as which one it is.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from eyas.bench.evidence import Row, answered
from eyas.config import Train
from eyas.corpus.read import read
from eyas.corpus.render import Renderer
from eyas.draft import checkpoint
from eyas.draft.config import DraftConfig
from eyas.draft.model import DraftModel
from eyas.draft.start import random
from eyas.draft.vocabulary import choose
from eyas.engines import target as targets
from eyas.engines.inprocess.target import InProcessTarget
from eyas.progress import Silent
from eyas.train.loop import Trainer
from eyas.train.packing import pack

LAYERS = (2, 4, 5)
TOKENS = 24
STEPS = 140
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Trained:
    """The target, the prompts as a file and the answers to them, and the draft that learned those, exported."""

    target: InProcessTarget
    prompts: Path
    rows: list[Row]
    draft: DraftModel
    folder: Path


def train(model: Path, folder: Path, vocabulary: int = 120, count: int = 16) -> Trained:
    """Train a draft of `vocabulary` tokens for the model of a folder on `count` answers; files go into `folder`."""
    info = targets.inspect(str(model), Silent())
    target = InProcessTarget(info, tuple(range(info.num_layers)), torch.float32, CPU)
    prompts = folder / "prompts.txt"
    prompts.write_text("".join(f"{chr(97 + i)} {i * 37 % 100}\n" for i in range(count)))
    render = Renderer(info, {})
    rows = answered(target, [render(row) for row in read(str(prompts), "heldout")[0]], TOKENS)
    counts = torch.bincount(torch.tensor([x for row in rows for x in row.answer]), minlength=info.vocab_size)
    ids = choose(counts, vocabulary)
    draft = DraftModel(DraftConfig.from_target(info.config, vocabulary), target.embedding)
    draft.set_vocabulary(ids)
    random(draft, target.head[ids], target.model.model.norm.weight, torch.Generator().manual_seed(0))
    config = Train(ttt_steps=3, learning_rate=8e-3, warmup=0.05)
    training = Trainer(draft.train(), target.head[ids].clone(), config, STEPS)
    samples = [row.sample(LAYERS) for row in rows]
    batch = pack([replace(one, argmax=target.greedy(one.last)) for one in samples], 3, CPU, torch.float32)
    for _ in range(STEPS):
        training.step(batch)
    (folder / "draft").mkdir()
    checkpoint.save(folder / "draft", draft.eval(), torch.float32)
    return Trained(target, prompts, rows, draft, folder / "draft")
