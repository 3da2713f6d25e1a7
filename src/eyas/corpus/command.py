"""What `eyas regenerate` puts together: tokenizer, template, whoever answers."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eyas.corpus import answering, work
from eyas.corpus.answering import Sampling
from eyas.corpus.regenerate import regenerate as answered_again
from eyas.corpus.talk import Kit
from eyas.corpus.template import Template
from eyas.engines import target as targets
from eyas.progress import Progress


def regenerate(
    names: Sequence[str],
    model: str,
    out: Path,
    progress: Progress,
    *,
    urls: Sequence[str],
    api: str,
    temperature: float,
    top_p: float,
    max_tokens: int,
    concurrency: int,
    limit: int | None,
    max_rejected: float,
    template: Path | None,
    kwargs: Mapping[str, Any],
) -> dict[str, Any]:
    """Counts of `regenerate.regenerate`; without `urls` the model answers in this process. Raises UserError."""
    orders = work.orders(model, progress, kwargs, template, None)
    sampling = Sampling(temperature, top_p, max_tokens)
    if not urls:
        info = targets.inspect(model, progress)
        targets.require_in_process(info)
        answerer = answering.in_process(info, sampling)
    elif api == "sglang":
        answerer = answering.by_sglang(urls, sampling, orders.ends, orders.vocab_size, concurrency)
    else:
        answerer = answering.by_openai(urls, sampling, orders.kwargs, concurrency)
    tokenizer = work.load_tokenizer(orders.folder)
    kit = Kit(tokenizer, Template(tokenizer, orders.kwargs, orders.template), orders.ends)
    settings = {"target": orders.digest, "model": model, "sampling": vars(sampling)}
    return answered_again(names, kit, answerer, settings, out, progress, limit=limit, max_rejected=max_rejected)
