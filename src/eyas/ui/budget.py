"""What a run's captured states will take, before anything is captured: part of `eyas plan`."""

import json
from pathlib import Path
from typing import Any

from eyas.config import RunConfig
from eyas.errors import UserError
from eyas.files import read_json
from eyas.plan.digests import Plan
from eyas.room import free, size, token_bytes
from eyas.run.folder import RunFolder

MEMORY = Path("/dev/shm")


def budget(folder: Path, config: RunConfig, plan: Plan) -> list[str]:
    """Bytes a token, tokens at most, bytes in all, and what is free; nothing once the capture is finished.

    Says so where the states cannot fit; the capture itself refuses by the exact figures.
    """
    run = RunFolder(folder)
    found = {step.name: run.step(step) for step in plan.steps}
    if "capture" not in found or found["capture"].finished:
        return []
    hidden = found["target"].result().get("hidden_size") or _hidden(Path(config.target.model))
    room = f"free: {size(free(folder))} in {folder}, {size(free(MEMORY))} in {MEMORY}"
    if not isinstance(hidden, int):
        return [f"States: of unknown size until the target step has run; {room}"]
    kinds = _kinds(config)
    total, tokens, missing = 0, 0, False
    for split, most in (
        ("train", config.answers.max_new_tokens),
        ("heldout", config.answers.heldout_max_new_tokens or config.answers.max_new_tokens),
    ):
        prompts = _prompts(found["prompts"].out / f"{split}.jsonl")
        missing = missing or prompts is None
        count = sum(prompt + most for prompt in prompts or [])
        tokens += count
        total += count * token_bytes(hidden, kinds[split])
    each = f"States: {token_bytes(hidden, kinds['train']):,} bytes a token ({kinds['train']})"
    if missing:
        return [f"{each}; how many is known after the prompts step; {room}"]
    lines = [f"{each}, at most {tokens:,} tokens, {size(total)}; {room}"]
    if total > free(folder):
        lines.append(
            f"  They may not fit: set store.codec=fp8, fewer prompts, or another folder with --runs ({folder})"
        )
    return lines


def _kinds(config: RunConfig) -> dict[str, str]:
    """The form of each split's states. What `auto` comes to is known where the target runs; taken is the larger."""
    served = config.engine.kind == "sglang"
    captured = config.target.dtype if config.target.dtype != "auto" else "bfloat16" if served else "float32"
    train = config.capture.dtype if config.capture.dtype != "auto" else captured
    answered = config.answers.heldout_dtype if config.answers.heldout_dtype != "auto" else captured
    return {"train": "fp8" if config.store.codec == "fp8" else train, "heldout": captured if served else answered}


def _hidden(model: Path) -> Any:
    try:
        config = read_json(model / "config.json")
        return (config.get("text_config") or config).get("hidden_size")
    except (OSError, UserError, AttributeError):
        return None


def _prompts(path: Path) -> list[int] | None:
    """Tokens of each prompt of a split; None while the prompts step has not run."""
    try:
        with path.open(encoding="utf-8") as file:
            return [len(json.loads(line)["ids"]) for line in file]
    except (OSError, ValueError, KeyError, TypeError):
        return None
