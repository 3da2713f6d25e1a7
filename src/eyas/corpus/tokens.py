"""Texts with supervised stretches -> token ids with supervised tokens, exactly as a server would be given them.

A server is given the ids of the prompt alone, and answers from there. One pass over the whole text gives the same ids
wherever the prompt's last piece comes out alike without the answer behind it: that is checked at each stretch. Where it
does not (a prompt that ends in a space which the answer's first token swallows), prompt and answer are encoded apart,
each answer in a sample of its own.
"""

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from eyas.corpus.conversation import Rejected
from eyas.corpus.shapes import Tokens
from eyas.corpus.template import Rendered

TOO_LONG, TRUNCATED, APART = "the answer lies beyond max_length", "cut at max_length", "prompt and answer encoded apart"
OUTSIDE = "a token id outside the target's vocabulary"
NOTHING = "no supervised token"
SHORT = 200
"""Characters of a prompt's last piece that is kept in mind: mostly it is the same in every row."""


@dataclass(frozen=True)
class Sample:
    """Ids, and which of them are supervised: the stretches `spans`, each [start, end), in order."""

    ids: list[int]
    spans: list[tuple[int, int]]

    @property
    def supervised(self) -> int:
        """How many tokens."""
        return sum(end - start for start, end in self.spans)


class Encoder:
    """Encodes with a tokenizer of transformers. `ends`: ids of which each ends an answer."""

    def __init__(self, tokenizer: Any, ends: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        self._fast = getattr(tokenizer, "backend_tokenizer", None)
        self._ends = frozenset(ends)
        added = tokenizer.added_tokens_decoder
        self._control = frozenset(token for token, about in added.items() if not about.lstrip and not about.rstrip)
        self._encode_short = functools.lru_cache(1024)(self._encode)

    def __call__(self, texts: Sequence[Rendered]) -> list[list[Sample]]:
        """The samples of each text: one, or one a stretch where prompt and answer had to be encoded apart."""
        if self._fast is None:
            return [self._apart(rendered) for rendered in texts]
        found = self._fast.encode_batch([rendered.text for rendered in texts], add_special_tokens=False)
        return [self._whole(rendered, encoding) for rendered, encoding in zip(texts, found, strict=True)]

    def _whole(self, rendered: Rendered, encoding: Any) -> list[Sample]:
        ids: list[int] = encoding.ids
        spans = []
        for start, end in rendered.spans:
            first, last = _token_at(encoding, rendered.text, start), _token_at(encoding, rendered.text, end)
            if first is None or last is None or not self._alike(rendered.text, encoding, ids, first, start):
                return self._apart(rendered)
            spans.append((first, self._end(ids, first, last)))
        return [Sample(ids, [span for span in spans if span[0] < span[1]])]

    def _alike(self, text: str, encoding: Any, ids: list[int], first: int, start: int) -> bool:
        """Do the tokens before an answer come out alike without it? They do up to the last control token anyway."""
        before = first - 1
        while before > 0 and ids[before] not in self._control:
            before -= 1
        begin = encoding.token_to_chars(before)[0] if before > 0 else 0
        encode = self._encode_short if start - begin <= SHORT else self._encode
        return encode(text[begin:start]) == tuple(ids[max(before, 0) : first])

    def _apart(self, rendered: Rendered) -> list[Sample]:
        samples = []
        for start, end in rendered.spans:
            prompt, answer = self._encode(rendered.text[:start]), self._encode(rendered.text[start:end])
            ids = [*prompt, *answer]
            samples.append(Sample(ids, [(len(prompt), self._end(ids, len(prompt), len(ids)))]))
        return samples

    def _end(self, ids: list[int], first: int, last: int) -> int:
        """Where the answer really ends: the template's text behind its end token is nobody's answer."""
        for token in range(last - 1, first - 1, -1):
            if ids[token] in self._ends:
                return token + 1
        return last

    def _encode(self, text: str) -> tuple[int, ...]:
        if self._fast is None:
            return tuple(self._tokenizer.encode(text, add_special_tokens=False))
        return tuple(self._fast.encode(text, add_special_tokens=False).ids)


def fitted(sample: Sample, max_length: int | None, vocab_size: int | None) -> tuple[Sample, bool]:
    """A sample of at most `max_length` tokens, and whether it had to be cut. Raises Rejected: nothing of it is left."""
    cut = max_length is not None and len(sample.ids) > max_length
    if cut:
        spans = [(start, min(end, max_length or 0)) for start, end in sample.spans if start < (max_length or 0)]
        if not spans:
            raise Rejected(TOO_LONG, f"{len(sample.ids)} tokens, supervised from {sample.spans[0][0]}")
        sample = Sample(sample.ids[:max_length], spans)
    if not sample.supervised:
        raise Rejected(NOTHING)
    if vocab_size is not None and (max(sample.ids) >= vocab_size or min(sample.ids) < 0):
        raise Rejected(OUTSIDE, f"{max(sample.ids)} of {vocab_size}")
    return sample, cut


def given(tokens: Tokens) -> Sample:
    """A row that came tokenised: never decoded and encoded again."""
    return Sample(list(tokens.ids), list(tokens.spans))


def _token_at(encoding: Any, text: str, at: int) -> int | None:
    """The token that begins at a character, or past which the text ends; None where one goes across it."""
    for position in range(at, len(text)):
        token: int | None = encoding.char_to_token(position)
        if token is not None:
            return token if encoding.token_to_chars(token)[0] >= at else None
    return len(encoding.ids)
