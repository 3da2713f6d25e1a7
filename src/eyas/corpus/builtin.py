"""The built-in prompts: what `make demo` asks SmolLM2-135M-Instruct, so that a first run needs no data of one's own.

Where they stand in the flow: prompts (here) -> rendered to token ids with the target's chat template (the corpus) ->
answered by the target itself -> captured and learned by the drafter.

The prompts lie in `prompts/train.jsonl` and `prompts/heldout.jsonl` beside this module, one JSON object a line:

    {"form": "poem", "topic": "bamboo", "text": "Write a haiku about bamboo."}

The form is what is asked for (a poem, a table, SQL ...), the topic what it is about; results can be broken down by
either. No topic occurs in both splits, and both hold every form in about the same proportion, so the accept length on
`heldout` tells how the drafter does on subjects it has not seen. The lines are shuffled once and for all, with each
form spread evenly over the file: any prefix is a fair mixture, and a smaller demo just takes the first lines.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

Split = Literal["train", "heldout"]

FOLDER = Path(__file__).with_name("prompts")
FIELDS = {"form", "topic", "text"}


@dataclass(frozen=True)
class Prompt:
    """One user turn, with what it asks for and what it is about."""

    text: str
    form: str
    topic: str


def load(split: Split) -> tuple[Prompt, ...]:
    """The prompts of a split, in their fixed order.

    Raises ValueError for a split that does not exist, and for a line of the data file that is no prompt.
    """
    if split not in get_args(Split):
        raise ValueError(f"no built-in prompts {split!r}: use one of {', '.join(get_args(Split))}")
    path = FOLDER / f"{split}.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines()
    return tuple(_parse(line, f"{path}:{number}") for number, line in enumerate(lines, start=1))


def _parse(line: str, where: str) -> Prompt:
    try:
        fields = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not a JSON object: {error}") from error
    if not isinstance(fields, dict) or fields.keys() != FIELDS or not all(isinstance(v, str) for v in fields.values()):
        raise ValueError(f"{where}: a prompt is an object with the texts form, topic and text, and nothing else")
    return Prompt(**fields)
