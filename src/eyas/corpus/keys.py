"""Keys: names of contents, equal exactly where the content is.

Each is an xxh3-128 in hexadecimal. Ids may be any integers, such as numpy's; a mask may be of bools or of 0 and 1.
"""

import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

from eyas.digests import digest_json

GREEDY: Mapping[str, Any] = {"temperature": 0}
"""Sampling settings of the target's own greedy answers."""


def conversation_key(messages: Sequence[Mapping[str, Any]]) -> str:
    """Key of a conversation's content.

    Normalised: Unicode in composed form, line ends as one newline, no white space around a text; the order of an
    object's keys does not matter, nor do keys without a value (null).
    """
    return digest_json([_normal(message) for message in messages])


def prompt_key(ids: Sequence[int], sampling: Mapping[str, Any] = GREEDY) -> str:
    """Key of a question to the target: the rendered ids before the answer, and how the answer is sampled."""
    return digest_json({"ids": [int(token) for token in ids], "sampling": dict(sampling)})


def sample_key(ids: Sequence[int], mask: Sequence[bool]) -> str:
    """Key of a sample: all ids, and which of them belong to an answer. Raises ValueError: lengths differ."""
    if len(ids) != len(mask):
        raise ValueError(f"{len(ids)} ids but {len(mask)} mask entries")
    return digest_json({"ids": [int(token) for token in ids], "mask": [int(flag) for flag in mask]})


def _normal(value: Any) -> Any:
    if isinstance(value, str):
        return unicodedata.normalize("NFC", value.replace("\r\n", "\n").replace("\r", "\n")).strip()
    if isinstance(value, Mapping):
        return {key: _normal(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [_normal(item) for item in value]
    return value
