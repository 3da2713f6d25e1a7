"""Whatever is said: the mask covers exactly the assistant's tokens, and the stretches make up the rendering."""

from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.corpus.conversation import Conversation
from eyas.corpus.template import Template
from eyas.corpus.tokens import Encoder, Sample
from goldens import load

ENDS = {
    "qwen25": "<|im_end|>",
    "llama3": "<|eot_id|>",
    "mistral": "</s>",
    "gemma3": "<end_of_turn>",
    "gpt-oss": "<|return|>",
}
TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30).map(str.strip).filter(bool)
TALKS = st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=4)
SPACED = st.text(st.sampled_from(" \n\tab.,1é"), min_size=1, max_size=12).filter(str.strip)


def talk(pairs: list[tuple[str, str]]) -> Conversation:
    messages: list[dict[str, Any]] = []
    for asked, answered in pairs:
        messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
    return Conversation(messages)


@cache
def kit(family: str) -> tuple[Any, Template, Encoder]:
    tokenizer, _, ends = load(family)
    return tokenizer, Template(tokenizer, {}), Encoder(tokenizer, ends)


def samples(template: Template, encoder: Encoder, conversation: Conversation) -> tuple[list[str], list[Sample]]:
    (rendered,) = template([conversation])
    assert isinstance(rendered, list)
    return [one.text for one in rendered], [sample for some in encoder(rendered) for sample in some]


@pytest.mark.parametrize("family", sorted(ENDS))
@given(pairs=TALKS)
@settings(max_examples=40)
def test_mask_covers_the_answers(family: str, pairs: list[tuple[str, str]]) -> None:
    tokenizer, template, encoder = kit(family)
    texts, made = samples(template, encoder, talk(pairs))
    head = "<|channel|>final<|message|>" if family == "gpt-oss" else ""
    said = [tokenizer.decode(sample.ids[a:b]) for sample in made for a, b in sample.spans]
    assert said == [f"{head}{answered}{ENDS[family]}" for _, answered in pairs]
    assert [tokenizer.decode(sample.ids) for sample in made] == texts


@given(pairs=st.lists(st.tuples(SPACED, SPACED), min_size=1, max_size=3))
@settings(max_examples=60)
def test_a_server_is_given_the_ids_before_each_answer(smollm2_kit: tuple[Any, Template, Encoder], pairs: Any) -> None:
    """With a real vocabulary, in which white space goes across the beginnings of answers."""
    tokenizer, template, encoder = smollm2_kit
    conversation = talk(pairs)
    _, made = samples(template, encoder, conversation)
    given_ids = [sample.ids[:start] for sample in made for start, _ in sample.spans]
    assert given_ids == [
        tokenizer.apply_chat_template(conversation.messages[:number], add_generation_prompt=True, return_dict=False)
        for number in conversation.answers
    ]
    said = [tokenizer.decode(sample.ids[a:b]) for sample in made for a, b in sample.spans]
    assert said == [f"{answered}<|im_end|>" for _, answered in pairs]


@pytest.fixture(scope="module")
def smollm2_kit(smollm2: Any) -> tuple[Any, Template, Encoder]:
    from eyas.corpus.work import load_tokenizer

    tokenizer = load_tokenizer(smollm2)
    return tokenizer, Template(tokenizer, {}), Encoder(tokenizer, [2])
