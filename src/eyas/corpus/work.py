"""A block of lines -> what becomes of each: samples with their keys, or reasons. What one of several processes does.

What becomes of a line is kept as bytes, in the cache and on the way to whoever writes it: one line of JSON about it
(`Outcome`), then each sample as a line of its own that lacks its source.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from eyas.corpus.cache import Cache
from eyas.corpus.conversation import Conversation, Rejected
from eyas.corpus.files import Block
from eyas.corpus.shapes import Shaped, Tokens, parse, shape
from eyas.corpus.template import Template
from eyas.corpus.tokens import APART, TRUNCATED, Encoder, Sample, fitted, given
from eyas.digests import digest_bytes, digest_json
from eyas.engines import fetch, modelfolder
from eyas.engines.target import folder_of
from eyas.errors import UserError
from eyas.progress import Progress

FORM = 1
"""Of the outcomes in a cache. Raised with every change of what becomes of a line."""


@dataclass(frozen=True)
class Orders:
    """How lines become samples: all of it is in `digest`."""

    folder: Path
    """Of the tokenizer."""
    ends: tuple[int, ...]
    vocab_size: int
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    template: str | None = None
    """Instead of the tokenizer's own."""
    max_length: int | None = None
    digest: str = ""


def orders(
    model: str, progress: Progress, kwargs: Mapping[str, Any], template: Path | None, max_length: int | None
) -> Orders:
    """For a model's folder or name; only its config and tokenizer are read. Raises UserError."""
    folder = fetch.fetch(model, progress) if model in fetch.MODELS else folder_of(model)
    config = modelfolder.read_object(folder / "config.json")
    vocab_size = (config.get("text_config") or config).get("vocab_size")
    if not isinstance(vocab_size, int):
        raise UserError(f"{folder / 'config.json'}: no vocab_size; take a complete model folder")
    text = None
    if template is not None:
        try:
            text = template.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{template}: cannot read the chat template ({error})") from error
    ends = modelfolder.eos_token_ids(folder, config, vocab_size)
    about = {
        "form": FORM,
        "tokenizer": modelfolder.tokenizer_digest(folder),
        "template": text or modelfolder.template_digest(folder),
        "kwargs": dict(kwargs),
        "ends": ends,
        "vocab_size": vocab_size,
        "max_length": max_length,
    }
    return Orders(folder, ends, vocab_size, dict(kwargs), text, max_length, digest_json(about))


@dataclass(frozen=True)
class Outcome:
    """What became of one line, in short."""

    rows: list[str]
    """The form of each row on it."""
    lengths: list[tuple[int, int]]
    """Tokens of each sample, and how many of them are supervised."""
    rejected: list[tuple[str, str]]
    """Reason and detail of each row that could not be used."""
    repairs: list[str]
    notes: list[str]
    """What else is counted: cut, encoded apart."""


@dataclass(frozen=True)
class Done:
    """A line that is finished."""

    line: int
    key: bytes
    data: bytes
    fresh: bool
    """Not from the cache."""

    def outcome(self) -> tuple[Outcome, list[bytes]]:
        """What became of it, and its samples' lines."""
        head, *samples = self.data.split(b"\n")
        return Outcome(**json.loads(head)), samples


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a model folder. Raises UserError."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        said = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"{folder}: the tokenizer cannot be loaded ({said})") from error


class Worker:
    """Does the work; made once in each process. `cache`: read, never written here."""

    def __init__(self, orders: Orders, cache: Path | None = None) -> None:
        self._orders = orders
        self.tokenizer = load_tokenizer(orders.folder)
        self._template = Template(self.tokenizer, orders.kwargs, orders.template)
        self._encoder = Encoder(self.tokenizer, orders.ends)
        self._cache = Cache(cache, write=False) if cache else None
        self._seed = orders.digest.encode()

    def __call__(self, block: Block) -> list[Done]:
        """What became of each line of a block, in order."""
        lines = list(block.numbered())
        seed = self._seed + (b"text" if block.text else b"json")
        keys = [xxhash.xxh3_128_digest(seed + line) for _, line in lines]
        known = self._cache.find(keys) if self._cache else {}
        todo = {key: line for key, (_, line) in zip(keys, lines, strict=True) if key not in known}
        made = dict(zip(todo, self._make(list(todo.values()), block.text), strict=True))
        return [
            Done(number, key, made[key] if key in made else known[key], key in made)
            for key, (number, _) in zip(keys, lines, strict=True)
        ]

    def samples(self, rows: Sequence[Shaped | Rejected]) -> list[list[tuple[Sample, list[str]]] | Rejected]:
        """Each row's samples with what is to be counted about them, or why there are none."""
        rendered = iter(self._template([row for row in rows if isinstance(row, Conversation)]))
        texts = [next(rendered) if isinstance(row, Conversation) else row for row in rows]
        encoded = iter(self._encoder([text for some in texts if isinstance(some, list) for text in some]))
        found: list[list[tuple[Sample, list[str]]] | Rejected] = []
        for some in texts:
            if isinstance(some, Rejected):
                found.append(some)
                continue
            parts = [[given(some)]] if isinstance(some, Tokens) else [next(encoded) for _ in some]
            try:
                found.append(self._fitted(parts))
            except Rejected as reason:
                found.append(reason)
        return found

    def _fitted(self, parts: list[list[Sample]]) -> list[tuple[Sample, list[str]]]:
        """The samples of one row that fit. Raises Rejected: none does; the first one's reason."""
        kept, reasons = [], []
        for part in parts:
            for sample in part:
                try:
                    whole, cut = fitted(sample, self._orders.max_length, self._orders.vocab_size)
                except Rejected as reason:
                    reasons.append(reason)
                else:
                    kept.append((whole, [TRUNCATED] * cut + [APART] * (len(part) > 1)))
        if not kept:
            raise reasons[0]
        return kept

    def _make(self, lines: Sequence[bytes], text: bool) -> list[bytes]:
        rows: list[Shaped | Rejected] = []
        forms: list[list[str]] = []
        for line in lines:
            forms.append([])
            try:
                values = parse(line, text)
            except Rejected as reason:
                values = [reason]
            for value in values:
                form, row = _shaped(value)
                forms[-1].append(form)
                rows.append(row)
        found = iter(zip(rows, self.samples(rows), strict=True))
        return [_packed(some, [next(found) for _ in some]) for some in forms]


def _shaped(value: Any) -> tuple[str, Shaped | Rejected]:
    if isinstance(value, Rejected):
        return "none", value
    try:
        return shape(value)
    except Rejected as reason:
        return "none", reason


def _packed(
    forms: list[str], found: Sequence[tuple[Shaped | Rejected, list[tuple[Sample, list[str]]] | Rejected]]
) -> bytes:
    """An Outcome and its samples, as bytes."""
    samples = [pair for _, some in found if isinstance(some, list) for pair in some]
    head = {
        "rows": forms,
        "lengths": [(len(sample.ids), sample.supervised) for sample, _ in samples],
        "rejected": [(some.reason, some.detail[:500]) for _, some in found if isinstance(some, Rejected)],
        "repairs": sorted(repair for row, _ in found if isinstance(row, Conversation) for repair in row.repairs),
        "notes": [note for _, notes in samples for note in notes],
    }
    return "\n".join([json.dumps(head), *(sample_line(sample) for sample, _ in samples)]).encode()


def sample_line(sample: Sample) -> str:
    """A sample as an object without its end; its key is `keys.sample_key`, written out of the same text."""
    ids = str(sample.ids).replace(" ", "")
    mask, at = [], 0
    for start, end in sample.spans:
        mask += ["0," * (start - at), "1," * (end - start)]
        at = end
    mask.append("0," * (len(sample.ids) - at))
    key = digest_bytes(f'{{"ids":{ids},"mask":[{"".join(mask)[:-1]}]}}'.encode())
    spans = json.dumps(sample.spans, separators=(",", ":"))
    return f'{{"key":"{key}","ids":{ids},"spans":{spans}'
