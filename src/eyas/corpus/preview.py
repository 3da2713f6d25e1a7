"""The first samples of some data as text, token by token: what is supervised, and what are control tokens."""

from collections.abc import Sequence
from typing import Any

from eyas.corpus.conversation import Rejected
from eyas.corpus.prepare import found
from eyas.corpus.read import contents
from eyas.corpus.tokens import Sample
from eyas.corpus.work import Orders, Worker
from eyas.errors import UserError


def preview(names: Sequence[str], orders: Orders, count: int) -> list[dict[str, Any]]:
    """`[{source, tokens, supervised, pieces [{text, supervised, control}]}]` of the first samples.

    Raises UserError: none in the data.
    """
    worker = Worker(orders)
    shown: list[dict[str, Any]] = []
    why = "no rows"
    for file, line, content in (row for path in found(names) for row in contents(path)):
        where = f"{file}:{line}"
        (samples,) = worker.samples([content])
        if isinstance(samples, Rejected):
            why = f"{where}: {samples}"
            continue
        shown += [_shown(worker.tokenizer, where, sample) for sample, _ in samples]
        if len(shown) >= count:
            return shown[:count]
    if not shown:
        raise UserError(f"nothing to preview: no row can be used ({why})")
    return shown


def _shown(tokenizer: Any, where: str, sample: Sample) -> dict[str, Any]:
    """Runs of equal kind are decoded together: a character may take several tokens."""
    control = set(tokenizer.added_tokens_decoder)
    kinds = [(False, token in control) for token in sample.ids]
    for start, end in sample.spans:
        kinds[start:end] = [(True, special) for _, special in kinds[start:end]]
    pieces, start = [], 0
    for end in range(1, len(kinds) + 1):
        if end == len(kinds) or kinds[end] != kinds[start]:
            text = tokenizer.decode(sample.ids[start:end], skip_special_tokens=False)
            pieces.append({"text": text, "supervised": kinds[start][0], "control": kinds[start][1]})
            start = end
    return {"source": where, "tokens": len(sample.ids), "supervised": sample.supervised, "pieces": pieces}
