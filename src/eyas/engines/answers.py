"""The answers step: the target's own greedy answers to the prompts, with their hidden states from the same pass.

Writes one shard file a batch, atomically; a later attempt skips the batches that are there. The capture step proves
them. An answer of the end token alone teaches nothing: it is counted as empty and left out. Rows are batched by length,
longest first, so that the first batch shows whether memory suffices.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from eyas.config import Answers, Capture, Engine, Target
from eyas.corpus.keys import sample_key
from eyas.corpus.repeats import loops
from eyas.engines import target as targets
from eyas.engines.device import pick_device, pick_dtype, use_threads
from eyas.engines.inprocess.generate import Answered, answer
from eyas.engines.inprocess.target import InProcessTarget
from eyas.engines.layers import resolve
from eyas.errors import UserError
from eyas.files import read_json, write_json
from eyas.progress import Progress
from eyas.room import free, size, token_bytes
from eyas.spec import StepSpec
from eyas.store.sample import Sample
from eyas.store.writer import write

SPLITS = ("train", "heldout")


@dataclass(frozen=True)
class Work:
    """One batch: rows of a split, where its shard goes, and how it is answered."""

    split: str
    file: str
    prompts: list[list[int]]
    max_new_tokens: int
    dtype: torch.dtype


class Targets:
    """The run file's target in memory: one for training prompts, one for held-out ones, the same if dtypes agree."""

    def __init__(self, spec: StepSpec) -> None:
        engine, capture = spec.section(Engine), spec.section(Capture)
        use_threads(engine)
        self.info = targets.read(spec.inputs["target"])
        self.layers = resolve(capture.layers, capture.convention, self.info.num_layers)
        device = pick_device(engine)
        self._device = device
        self._dtypes = {
            "train": pick_dtype(spec.section(Target).dtype, device),
            "heldout": pick_dtype(spec.section(Answers).heldout_dtype, device),
        }
        self._loaded: InProcessTarget | None = None

    def dtype(self, split: str) -> torch.dtype:
        """The dtype in which prompts of a split are answered."""
        return self._dtypes[split]

    def get(self, split: str) -> InProcessTarget:
        """The target for a split; loaded when it is asked for, one at a time."""
        dtype = self._dtypes[split]
        if self._loaded is None or self._loaded.dtype != dtype:
            self._loaded = None  # frees the memory of the one before
            self._loaded = InProcessTarget(self.info, self.layers, dtype, self._device)
        return self._loaded


def run(spec: StepSpec, out: Path, progress: Progress) -> dict[str, Any]:
    """Step entry."""
    progress.milestone("loading the target")
    loaded = Targets(spec)
    config, capture = spec.section(Answers), spec.section(Capture)
    stored = {"auto": loaded.dtype("train"), "float32": torch.float32, "bfloat16": torch.bfloat16}[capture.dtype]
    rows = {split: read_rows(spec.inputs["prompts"] / f"{split}.jsonl") for split in SPLITS}
    longest = {"train": config.max_new_tokens, "heldout": config.heldout_max_new_tokens or config.max_new_tokens}
    room = loaded.get("heldout").longest
    fitting = {split: [ids for ids in prompts if len(ids) + longest[split] <= room] for split, prompts in rows.items()}
    for split in SPLITS:
        if not fitting[split]:
            raise UserError(
                f"answers: no {split} prompt leaves room for {longest[split]} new tokens in the target's context of "
                f"{room}: lower answers.max_new_tokens or shorten the prompts"
            )
    works = [
        Work(split, f"{split}-{number:05}.safetensors", prompts, longest[split], dtype)
        for split, dtype in (("heldout", loaded.dtype("heldout")), ("train", stored))
        for number, prompts in enumerate(batches(fitting[split], config.batch))
    ]
    (out / "batches").mkdir(exist_ok=True)
    finished = [work for work in works if (out / "batches" / f"{work.file}.json").is_file()]
    progress.milestone(require_room(out, [work for work in works if work not in finished], loaded.info.hidden_size))
    # Answers mostly run into their limit; the total is what they would have if all did.
    progress.total(sum(map(_most, works)), "tokens", sum(map(_most, finished)))
    for work in works:
        if work in finished:
            continue
        said = 0

        def say(tokens: int) -> None:
            nonlocal said
            said += tokens
            progress.advance(tokens)

        target = loaded.get(work.split)
        progress.milestone(f"answering {work.split} prompts")
        answered = answer(target, work.prompts, work.max_new_tokens, capture=work.dtype, said=say)
        progress.advance(_most(work) - said)
        useful = [a for a in answered if len(a.ids) - a.prompt > 1]
        if useful:
            write(out / "batches" / work.file, [to_sample(a) for a in useful])
        write_json(out / "batches" / f"{work.file}.json", figures(answered))
    too_long = sum(len(rows[split]) - len(fitting[split]) for split in SPLITS)
    versions = {"versions": {"transformers": transformers.__version__, "torch": torch.__version__}}
    return totals(out, works) | {"too_long": too_long} | versions


def require_room(out: Path, works: Sequence[Work], hidden: int) -> str:
    """Say what the states will take and what is free, before any is written. How long answers are is not known yet:
    refused is what cannot fit even with the shortest. Raises UserError."""
    least = most = 0
    for work in works:
        each = token_bytes(hidden, str(work.dtype).removeprefix("torch."))
        prompts = sum(map(len, work.prompts))
        least += each * (prompts + 2 * len(work.prompts))
        most += each * (prompts + work.max_new_tokens * len(work.prompts))
    told = f"states: at least {size(least)}, at most {size(most)}; {size(free(out))} free in {out}"
    if least > free(out):
        raise UserError(f"{told}: free some space, take fewer prompts, or another folder with --runs")
    return told


def read_rows(path: Path) -> list[list[int]]:
    """The prompts' ids of one split, in order."""
    with path.open(encoding="utf-8") as file:
        return [json.loads(line)["ids"] for line in file]


def batches(prompts: Sequence[list[int]], size: int) -> list[list[list[int]]]:
    """Prompts of similar length together, longest first."""
    ordered = sorted(prompts, key=lambda ids: (-len(ids), ids))
    return [list(ordered[i : i + size]) for i in range(0, len(ordered), size)]


def to_sample(answered: Answered) -> Sample:
    """An answered prompt as a sample of the store: the answer is what counts."""
    assert answered.aux is not None
    assert answered.last is not None
    assert answered.argmax is not None
    mask = torch.zeros(len(answered.ids), dtype=torch.bool)
    mask[answered.prompt :] = True
    return Sample(
        key=sample_key(answered.ids, mask.tolist()),
        ids=torch.tensor(answered.ids),
        answer=mask,
        aux=answered.aux,
        last=answered.last,
        argmax=answered.argmax.long(),
    )


def figures(answered: Sequence[Answered]) -> dict[str, int]:
    """Counts of one batch."""
    return {
        "rows": len(answered),
        "tokens": sum(len(a.ids) - a.prompt for a in answered),
        "empty": sum(len(a.ids) - a.prompt < 2 for a in answered),
        "looping": sum(loops(a.ids[a.prompt :]) for a in answered),
    }


def totals(out: Path, works: Sequence[Work]) -> dict[str, int]:
    """Counts of all batches."""
    sums = {"rows": 0, "tokens": 0, "heldout_rows": 0, "heldout_tokens": 0, "empty": 0, "looping": 0}
    for work in works:
        counts = read_json(out / "batches" / f"{work.file}.json")
        prefix = "heldout_" if work.split == "heldout" else ""
        sums[f"{prefix}rows"] += counts["rows"]
        sums[f"{prefix}tokens"] += counts["tokens"]
        sums["empty"] += counts["empty"]
        sums["looping"] += counts["looping"]
    return sums


def _most(work: Work) -> int:
    return len(work.prompts) * work.max_new_tokens
