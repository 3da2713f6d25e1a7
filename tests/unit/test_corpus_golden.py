"""Ids and masks of the common template families, against files written by hand (tests/golden/README.md)."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from eyas.corpus.conversation import Conversation, Rejected, conversation
from eyas.corpus.template import Template
from eyas.corpus.tokens import Encoder

GOLDEN = Path(__file__).parent.parent / "golden"
CASES = [
    pytest.param(path.stem, case, id=f"{path.stem}-{case['name']}")
    for path in sorted(GOLDEN.glob("*.json"))
    for case in json.loads(path.read_text())["cases"]
]


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


def ids_of(text: str, control: dict[str, int]) -> list[int]:
    """The ids of a text by the rule of the golden files, without any tokenizer."""
    pattern = "(" + "|".join(re.escape(token) for token in sorted(control, key=len, reverse=True)) + ")"
    return [
        token for part in re.split(pattern, text) for token in ([control[part]] if part in control else part.encode())
    ]


def cleaned(case: dict[str, Any]) -> Conversation:
    return conversation(case["messages"], case.get("tools"))


@pytest.mark.parametrize(("family", "case"), CASES)
def test_ids_and_mask(family: str, case: dict[str, Any]) -> None:
    tokenizer, control, ends = load(family)
    (rendered,) = Template(tokenizer, case.get("kwargs", {}))([cleaned(case)])
    if isinstance(case["expect"][0], dict):
        assert isinstance(rendered, Rejected)
        assert rendered.reason == case["expect"][0]["rejected"]
        return
    assert not isinstance(rendered, Rejected), rendered
    samples = [sample for some in Encoder(tokenizer, ends)(rendered) for sample in some]
    found = [
        [
            (tokenizer.decode(sample.ids[a:b], skip_special_tokens=False), flag)
            for (a, b), flag in pieces(sample.spans, len(sample.ids))
        ]
        for sample in samples
    ]
    assert found == [[tuple(piece) for piece in pieces] for pieces in case["expect"]]
    for sample, expected in zip(samples, case["expect"], strict=True):
        assert sample.ids == [token for text, _ in expected for token in ids_of(text, control)]
        mask = [flag for text, flag in expected for _ in ids_of(text, control)]
        assert [int(any(a <= i < b for a, b in sample.spans)) for i in range(len(sample.ids))] == mask


@pytest.mark.parametrize(("family", "case"), CASES)
def test_the_server_is_given_what_stands_before_each_answer(family: str, case: dict[str, Any]) -> None:
    """`apply_chat_template` with a generation prompt, as every server does it, gives a beginning of a sample."""
    if isinstance(case["expect"][0], dict):
        return
    tokenizer, _, ends = load(family)
    kwargs = case.get("kwargs", {})
    talk = cleaned(case)
    template = Template(tokenizer, kwargs)
    (rendered,) = template([talk])
    assert isinstance(rendered, list)
    samples = [sample for some in Encoder(tokenizer, ends)(rendered) for sample in some]
    given = [sample.ids[:start] for sample in samples for start, _ in sample.spans]
    for number, prompt in zip(talk.answers, given, strict=True):
        text = template.render(talk.messages[:number], talk.tools, True)
        assert prompt == tokenizer.encode(text, add_special_tokens=False)


def pieces(spans: list[tuple[int, int]], length: int) -> list[tuple[tuple[int, int], int]]:
    """The stretches of a sample in order, each with whether it is supervised."""
    found, at = [], 0
    for a, b in spans:
        found += [((at, a), 0), ((a, b), 1)]
        at = b
    return [*found, *([((at, length), 0)] if at < length else [])]
