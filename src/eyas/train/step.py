"""The training step: features and vocabulary in, trained weights out. Stands between capture and export."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from eyas.config import Draft, Engine, Train
from eyas.decode.replay import pooled, replay, spread
from eyas.draft import checkpoint, start, vocabulary
from eyas.draft.config import DraftConfig
from eyas.draft.model import DraftModel
from eyas.engines import target as targets
from eyas.engines import weights
from eyas.engines.device import native_bfloat16, pick_device, use_threads
from eyas.errors import UserError
from eyas.files import read_json, write_json
from eyas.progress import Progress, Silent
from eyas.spec import StepSpec
from eyas.store.shard import Sample
from eyas.store.store import FeatureStore
from eyas.train.data import Rows, Steps, to_batch
from eyas.train.loader import Loader
from eyas.train.loop import Step, Trainer, evenly, mean_loss
from eyas.train.packing import Batch, pack, plan

STATE, RESULT, CURVE = "state.safetensors", "training.json", "curve.json"
DRAFT = "draft"
"""Folder of the trained draft in float32, in the output."""
CURVE_ROWS = 48
"""Held-out answers behind each point of the acceptance curve; the verdict's figures use all of them."""
CURVE_TOKENS = 3
"""Draft tokens of the curve."""
SAY_EVERY = 10


def run(spec: StepSpec, out: Path, progress: Progress) -> dict[str, Any]:
    """Step entry. Saves its state evenly spread over the run and goes on from the last one."""
    engine, config = spec.section(Engine), spec.section(Train)
    use_threads(engine)
    device = pick_device(engine)
    if (out / RESULT).is_file():  # an attempt that was ended just before it was published
        (out / STATE).unlink(missing_ok=True)
        finished: dict[str, Any] = read_json(out / RESULT)
        return finished
    if device.type == "cpu":
        torch.use_deterministic_algorithms(True)
    info = targets.read(spec.inputs["target"])
    store = FeatureStore.open(spec.inputs["capture"] / "train", target=info)
    heldout = FeatureStore.open(spec.inputs["capture"] / "heldout", target=info)
    batches = plan(store.lengths, config.batch_tokens, config.epochs, spec.seed)
    draft, head = build(spec, device)
    dtype = torch.bfloat16 if device.type == "cuda" or native_bfloat16() else torch.float32
    trainer = Trainer(draft, head, config, len(batches), dtype)
    state = out / STATE
    if state.is_file():
        trainer.restore(state)
    else:
        progress.milestone("fitting the start")
        begin(draft, info, spec.section(Draft).start, spec.seed, len(store), store.sample)
        _evaluate(trainer, heldout, progress, out / CURVE, 0)
        trainer.save(state)
    lengths = store.lengths
    tokens = [sum(lengths[i] for i in batch) for batch in batches]
    progress.total(sum(tokens), "tokens", sum(tokens[: trainer.number]))
    progress.milestone("training")
    saves, evaluations = evenly(config.checkpoints, len(batches)), evenly(config.evaluations, len(batches))
    recent: list[Step] = []
    began, first = time.monotonic(), trainer.number
    steps = Steps(store, batches, pin=device.type == "cuda")

    def load(number: int) -> tuple[Rows, Batch]:
        rows = steps.read(number)
        return rows, to_batch(rows, config.ttt_steps, device, dtype)

    for rows, batch in Loader(load, range(trainer.number, len(batches)), device):
        recent.append(trainer.step(batch, names=_names(rows.keys)))
        progress.advance(tokens[rows.step])
        if trainer.number % SAY_EVERY == 0 or trainer.number == len(batches):
            said = sum(tokens[: trainer.number])
            progress.metric(
                step=trainer.number, tokens=said, loss=mean_loss(recent), learning_rate=recent[-1].learning_rate
            )
            recent = recent[-1:] if trainer.number == len(batches) else []
        if trainer.number in evaluations:
            _evaluate(trainer, heldout, progress, out / CURVE, sum(tokens[: trainer.number]))
        if trainer.number in saves:
            trainer.save(state)
    seconds = max(time.monotonic() - began, 1e-9)
    (out / DRAFT).mkdir(exist_ok=True)
    checkpoint.save(out / DRAFT, draft, torch.float32)
    result = {
        "steps": len(batches),
        "tokens": sum(tokens),
        "loss": trainer.loss,
        "curve": read_json(out / CURVE),
        "tokens_per_second": sum(tokens[first:]) / seconds if first < len(batches) else None,
        "digest": checkpoint.digest(draft),
        "versions": {"torch": torch.__version__},
    }
    write_json(out / RESULT, result)
    state.unlink()  # only needed to go on
    return result


def build(spec: StepSpec, device: torch.device) -> tuple[DraftModel, torch.Tensor]:
    """An untrained draft with its vocabulary, and the target's head rows [D, H] for it, both float32 on `device`."""
    info = targets.read(spec.inputs["target"])
    section = spec.section(Draft)
    ids = vocabulary.read(spec.inputs["vocabulary"])
    config = DraftConfig.from_target(info.config, len(ids), fc_norm=section.fc_norm, norm_output=section.norm_output)
    embedding = nn.Embedding.from_pretrained(weights.embedding(info.folder).float())
    draft = DraftModel(config, embedding)
    draft.set_vocabulary(ids)
    head = weights.head(info.folder)[ids].float()
    return draft.to(device), head.to(device)


@torch.no_grad()
def begin(
    draft: DraftModel, info: targets.TargetInfo, how: str, seed: int, count: int, sample: Callable[[int], Sample]
) -> None:
    """Give the draft its first weights, as `draft.start` says; `sample(i)` is one of `count` training samples."""
    generator = torch.Generator().manual_seed(seed)
    head = weights.head(info.folder)[draft.target_ids.cpu()].float()
    start.random(draft, head, weights.final_norm(info.folder).float(), generator)
    if how == "random":
        return
    aux, following, goals = [], [], []
    found = 0
    for i in torch.randperm(count, generator=generator).tolist():
        batch = pack([sample(i)], 1, draft.fc.weight.device, torch.float32)
        rows = batch.chains.state_row
        aux.append(batch.aux if rows is None else batch.aux[rows])
        following.append(batch.chains.next_ids)
        goals.append(batch.last)
        found += len(batch.chains)
        if found >= start.MOST:
            break
    if not found:
        raise UserError("train: no answer in the training set has two tokens; look at the answers step's output")
    last_mlp = weights.last_mlp(info.folder, info.num_layers)
    start.fitted(draft, torch.cat(aux), torch.cat(following), torch.cat(goals), last_mlp)


def _evaluate(trainer: Trainer, heldout: FeatureStore, progress: Progress, curve: Path, tokens: int) -> None:
    """Say the held-out acceptance, and add it to the curve in place of what an ended attempt said from here on."""
    rows = spread(len(heldout), CURVE_ROWS)
    walks = [
        (sample.ids[sample.answer].tolist(), tally)
        for _, sample, tally in replay(trainer.draft, heldout, CURVE_TOKENS, rows, Silent())
    ]
    figures = pooled(walks, CURVE_TOKENS)
    joint = {
        f"accept_{entry['position']}": entry["accepted"] / max(1, figures["rounds"]) for entry in figures["by_position"]
    }
    progress.metric(step=trainer.number, accept_length=figures["accept_length"], **joint)
    before = [point for point in (read_json(curve) if curve.is_file() else []) if point["tokens"] < tokens]
    write_json(curve, [*before, {"tokens": tokens, "accept_length": figures["accept_length"]}])


def _names(keys: list[str]) -> str:
    return ", ".join(key[:12] for key in keys[:5]) + (" …" if len(keys) > 5 else "")
