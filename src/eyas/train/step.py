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
from eyas.draft.layers import require_layers
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
from eyas.train.data import Steps, to_batch
from eyas.train.loader import Loader
from eyas.train.loop import Step, Trainer, evenly, mean_loss
from eyas.train.packing import Batch, pack, plan
from eyas.train.parallel import World, together

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
    if (out / RESULT).is_file():  # an attempt that was ended just before it was published
        (out / STATE).unlink(missing_ok=True)
        finished: dict[str, Any] = read_json(out / RESULT)
        return finished
    device = pick_device(engine)
    ranks = config.ranks or (torch.cuda.device_count() if device.type == "cuda" else 1)
    with together(ranks, device, train, spec, out, Silent()) as world:
        result = train(world, spec, out, progress)
    write_json(out / RESULT, result)
    (out / STATE).unlink()  # only needed to go on
    return result


def train(world: World, spec: StepSpec, out: Path, progress: Progress) -> dict[str, Any]:
    """Train as one rank; the first one evaluates, saves, and writes the draft. Returns the step's result."""
    config, first_rank = spec.section(Train), world.rank == 0
    device = world.device(pick_device(spec.section(Engine)))
    if device.type == "cpu":
        torch.use_deterministic_algorithms(True)
    info = targets.read(spec.inputs["target"])
    store = FeatureStore.open(spec.inputs["capture"] / "train", target=info)
    heldout = FeatureStore.open(spec.inputs["capture"] / "heldout", target=info)
    lengths = store.lengths
    batches = plan(lengths, config.batch_tokens, config.epochs, spec.seed)
    dtype = torch.bfloat16 if device.type == "cuda" or native_bfloat16() else torch.float32
    draft, head = build(spec, device, dtype)
    trainer = Trainer(draft, head, config, len(batches), dtype, world=world)
    state = out / STATE
    if state.is_file():
        trainer.restore(state)
    else:
        if existing := spec.section(Draft).existing:
            require_layers(Path(existing), info, store.contract)
        else:
            progress.milestone("fitting the start")
            begin(draft, info, spec.section(Draft).start, spec.seed, len(store), store.sample)
        world.wait()  # nobody looks for the state before all have looked
        if first_rank:
            _evaluate(trainer, heldout, progress, out / CURVE, 0)
            trainer.save(state)
    tokens = [sum(lengths[i] for i in batch) for batch in batches]
    done = sum(tokens[: trainer.number])
    progress.total(sum(tokens), "tokens", done)
    progress.milestone("training")

    steps = Steps(store, batches, world=world, part_tokens=config.micro_tokens, pin=device.type == "cuda")

    def load(number: int) -> tuple[list[Batch], str]:
        parts = steps.read(number)
        batches = [to_batch(rows, config.ttt_steps, device, dtype) for rows in parts]
        return batches, _names([key for rows in parts for key in rows.keys])

    saves, evaluations = evenly(config.checkpoints, len(batches)), evenly(config.evaluations, len(batches))
    loader = Loader(load, range(trainer.number, len(batches)), device)
    recent: list[Step] = []
    began, first = time.monotonic(), trainer.number
    for parts, names in loader:
        recent.append(trainer.step(*parts, names=names))
        progress.advance(tokens[trainer.number - 1])
        done += tokens[trainer.number - 1]
        last = trainer.number == len(batches)
        if trainer.number % SAY_EVERY == 0 or last:
            seconds = time.monotonic() - began
            progress.metric(
                step=trainer.number,
                tokens=done,
                loss=mean_loss(recent),
                learning_rate=recent[-1].learning_rate,
                gradient_norm=recent[-1].gradient_norm,
                tokens_per_second=sum(tokens[first : trainer.number]) / seconds,
                waited_for_loader=loader.waited / seconds,
            )
            recent = recent[-1:] if last else []
        if first_rank and trainer.number in evaluations:
            _evaluate(trainer, heldout, progress, out / CURVE, done)
        if first_rank and trainer.number in saves:
            trainer.save(state)
    seconds = max(time.monotonic() - began, 1e-9)
    if first_rank:
        (out / DRAFT).mkdir(exist_ok=True)
        checkpoint.save(out / DRAFT, draft, torch.float32)
    return {
        "steps": len(batches),
        "tokens": sum(tokens),
        "loss": trainer.loss,
        "curve": read_json(out / CURVE),
        "tokens_per_second": sum(tokens[first:]) / seconds if first < len(batches) else None,
        "digest": checkpoint.digest(draft),
        "versions": {"torch": torch.__version__},
    }


def build(spec: StepSpec, device: torch.device, dtype: torch.dtype) -> tuple[DraftModel, torch.Tensor]:
    """An untrained draft, or the one to go on with, in float32, its vocabulary set and its embeddings in `dtype`; and
    the target's head rows [D, H] for it. On `device`."""
    info = targets.read(spec.inputs["target"])
    section = spec.section(Draft)
    ids = vocabulary.read(spec.inputs["vocabulary"])
    head = weights.head(info.folder)[ids].float().to(device)
    embedding = nn.Embedding.from_pretrained(weights.embedding(info.folder).to(dtype))
    if section.existing is not None:
        return checkpoint.load(Path(section.existing), embedding).to(device).train(), head
    config = DraftConfig.from_target(info.config, len(ids), fc_norm=section.fc_norm, norm_output=section.norm_output)
    draft = DraftModel(config, embedding)
    draft.set_vocabulary(ids)
    return draft.to(device), head


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
