"""The built-in prompts: enough of them, no repeats, and held-out ones that really are held out."""

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from eyas.corpus import builtin

TRAIN = builtin.load("train")
HELDOUT = builtin.load("heldout")
BOTH = TRAIN + HELDOUT


def test_counts() -> None:
    assert len(TRAIN) >= 1440
    assert len(HELDOUT) >= 160
    assert len({prompt.topic.casefold() for prompt in TRAIN}) >= 240


def test_order_is_that_of_the_file() -> None:
    assert builtin.load("train") == TRAIN


def test_no_text_occurs_twice() -> None:
    counts = Counter(prompt.text.casefold() for prompt in BOTH)
    assert [text for text, count in counts.items() if count > 1] == []


def test_topics_are_disjoint() -> None:
    assert {prompt.topic.casefold() for prompt in TRAIN} & {prompt.topic.casefold() for prompt in HELDOUT} == set()


def test_no_training_text_names_a_heldout_topic() -> None:
    topics = {prompt.topic.casefold() for prompt in HELDOUT}
    named = re.compile(r"\b(" + "|".join(map(re.escape, sorted(topics))) + r")\b")
    assert [prompt.text for prompt in TRAIN if named.search(prompt.text.casefold())] == []


def test_both_splits_hold_all_forms_in_like_proportion() -> None:
    train, heldout = (Counter(prompt.form for prompt in prompts) for prompts in (TRAIN, HELDOUT))
    assert len(train) >= 20
    assert train.keys() == heldout.keys()
    for form, count in train.items():
        assert abs(count / len(TRAIN) - heldout[form] / len(HELDOUT)) < 0.02, form


def test_any_form_has_several_phrasings() -> None:
    openings: dict[str, set[str]] = {}
    for prompt in TRAIN:
        openings.setdefault(prompt.form, set()).add(" ".join(prompt.text.casefold().split()[:3]))
    assert {form: len(starts) for form, starts in openings.items() if len(starts) < 4} == {}


@pytest.mark.parametrize("prompts", [TRAIN, HELDOUT], ids=["train", "heldout"])
def test_a_prefix_is_a_mixture(prompts: tuple[builtin.Prompt, ...]) -> None:
    assert len({prompt.form for prompt in prompts[:200]}) >= 18
    assert len({prompt.topic for prompt in prompts[:100]}) >= 60


def test_texts_are_short_and_clean() -> None:
    for prompt in BOTH:
        assert 3 <= len(prompt.text.split()) <= 80, prompt
        for value in (prompt.text, prompt.form, prompt.topic):
            assert value.isprintable(), prompt
            assert value, prompt
            assert value == " ".join(value.split()), prompt
        assert not re.search(r"[{}]", prompt.text), prompt
    usual = [prompt for prompt in BOTH if 5 <= len(prompt.text.split()) <= 30]
    assert len(usual) >= 0.9 * len(BOTH)


def test_unknown_split_names_the_allowed_ones() -> None:
    other: Any = "test"
    with pytest.raises(ValueError, match=r"'test'.*train, heldout"):
        builtin.load(other)


@pytest.mark.parametrize(
    "line", ["{", "[]", '{"form": "poem", "topic": "bamboo"}', '{"form": 1, "topic": "", "text": ""}']
)
def test_a_bad_line_is_named(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = '{"form": "poem", "topic": "bamboo", "text": "Write a haiku about bamboo."}'
    (tmp_path / "train.jsonl").write_text(f"{good}\n{line}\n", encoding="utf-8")
    monkeypatch.setattr(builtin, "FOLDER", tmp_path)
    with pytest.raises(ValueError, match=r"train\.jsonl:2: "):
        builtin.load("train")
