"""Ids and masks of the common template families, against files written by hand (tests/golden/README.md)."""

import json
import re
from typing import Any

import pytest

from eyas.corpus.conversation import Conversation, Rejected, conversation
from eyas.corpus.template import Template
from eyas.corpus.tokens import Encoder
from goldens import GOLDEN, load

CASES = [
    pytest.param(path.stem, case, id=f"{path.stem}-{case['name']}")
    for path in sorted(GOLDEN.glob("*.json"))
    for case in json.loads(path.read_text())["cases"]
]


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
    """Pitfalls 23 and 24: the mask is the template's, and no opener is lost or doubled."""
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


class Slow:
    """A tokenizer in Python, as some models bring one: it can encode, and that is all."""

    def __init__(self, tokenizer: Any) -> None:
        self.encode, self.added_tokens_decoder = tokenizer.encode, tokenizer.added_tokens_decoder


@pytest.mark.parametrize("family", ["qwen25", "llama3"])
def test_tokenizers_without_offsets(family: str) -> None:
    """Each answer in a sample of its own, behind what its server was given."""
    tokenizer, _, ends = load(family)
    case = next(c.values[1] for c in CASES if c.values[0] == family and c.values[1]["name"] == "system and turns")
    (rendered,) = Template(tokenizer, {})([cleaned(case)])
    assert isinstance(rendered, list)
    ((fast,),) = Encoder(tokenizer, ends)(rendered)
    (slow,) = Encoder(Slow(tokenizer), ends)(rendered)
    assert [sample.spans for sample in slow] == [[span] for span in fast.spans]
    assert all(fast.ids[: len(sample.ids)] == sample.ids for sample in slow)


def test_tools_for_all_conversations() -> None:
    """`tools` among target.chat_template_kwargs holds where a row has none."""
    tokenizer, _, _ = load("qwen25")
    case = next(c.values[1] for c in CASES if c.values[0] == "qwen25" and c.values[1]["name"] == "tools")
    with_its_own = Template(tokenizer, {})([cleaned(case)])
    assert Template(tokenizer, {"tools": case["tools"]})([conversation(case["messages"])]) == with_its_own
