"""`eyas regenerate`: what it is asked, and what it shows."""

import importlib
from pathlib import Path
from typing import Annotated

import typer

from eyas.errors import UserError
from eyas.ui.data import DATA, KWARGS, RUN, TARGET, settings


def regenerate(
    data: DATA,
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where answered conversations go.", show_default=False)],
    target: TARGET = None,
    run: RUN = None,
    url: Annotated[
        list[str] | None, typer.Option(help="A server; may be given again. Default: in-process.", show_default=False)
    ] = None,
    api: Annotated[str, typer.Option(metavar="openai|sglang", help="What the servers speak.")] = "openai",
    temperature: Annotated[float, typer.Option(min=0, max=2)] = 0.0,
    top_p: Annotated[float, typer.Option(min=0.01, max=1)] = 1.0,
    max_tokens: Annotated[int, typer.Option(min=2, help="Longest answer.")] = 512,
    concurrency: Annotated[int, typer.Option(min=1, help="Most requests at once to each server.")] = 64,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first rows.", show_default=False)] = None,
    max_rejected: Annotated[
        float | None, typer.Option(min=0, max=1, help="Fail above this share; default: 0.05.", show_default=False)
    ] = None,
    chat_template: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Instead of the tokenizer's own.", show_default=False)
    ] = None,
    chat_template_kwargs: KWARGS = None,
) -> None:
    """Have the target answer conversations again, turn by turn. Stopped, the same command goes on."""
    from eyas.run.faults import plain_errors
    from eyas.ui.single import Lines

    if api not in ("openai", "sglang"):
        raise UserError(f"--api {api}: choose openai (/v1/chat/completions) or sglang (/generate)")
    model, kwargs, share = settings(target, run, chat_template_kwargs)
    share = share if max_rejected is None else max_rejected
    progress = Lines()
    with plain_errors(out):
        command = importlib.import_module("eyas.corpus.command")
        report = command.regenerate(
            data, model, out, progress, urls=url or [], api=api, temperature=temperature, top_p=top_p,
            max_tokens=max_tokens, concurrency=concurrency, limit=limit, max_rejected=share, template=chat_template,
            kwargs=kwargs,
        )  # fmt: skip
    rows = [(name, report[name]) for name in ("rows", "samples", "tokens", "resumed", "cut", "without_ids")]
    rows += [(f"rejected: {reason}", count) for reason, count in report["rejected"].items()]
    width = max(len(name) for name, _ in rows)
    print("\n".join(f"{name.replace('_', ' '):{width}}  {count}" for name, count in rows))
    print(out)
