"""The tokenizers of tests/golden: a byte is its own id, the control tokens come behind, from 256 on."""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

GOLDEN = Path(__file__).with_name("golden")


def byte_letters() -> list[str]:
    """The letter by which byte-level tokenizers write each byte: itself where it can be printed, else from 256 on."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(others)) for byte in range(256)]


def load(family: str) -> tuple[Any, dict[str, int], list[int]]:
    """Tokenizer, ids of its control tokens, and those that end an answer."""
    about = json.loads((GOLDEN / f"{family}.json").read_text())
    tokenizer = Tokenizer(models.BPE({letter: byte for byte, letter in enumerate(byte_letters())}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in about["control"]])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **about["special"])
    fast.chat_template = (GOLDEN / f"{family}.jinja").read_text()
    control = {token: 256 + number for number, token in enumerate(about["control"])}
    return fast, control, [control[token] for token in about["ends"]]
