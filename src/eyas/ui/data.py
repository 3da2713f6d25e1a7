"""`eyas prepare`: what it is asked, and what it shows."""

import importlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from eyas.errors import UserError

DATA = Annotated[
    list[str], typer.Argument(metavar="DATA...", help="Files, folders, globs or hf:data/sets.", show_default=False)
]
TARGET = Annotated[str | None, typer.Option(help="The model: a folder or a name.", show_default=False)]
RUN = Annotated[
    Path | None,
    typer.Option("--run", metavar="RUNFILE", help="Take the target and its settings from there.", show_default=False),
]
KWARGS = Annotated[
    str | None,
    typer.Option(metavar="JSON", help="As target.chat_template_kwargs, e.g. '{\"enable_thinking\": false}'."),
]
BAR = 40


def prepare(
    data: DATA,
    target: TARGET = None,
    run: RUN = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Where samples go.", show_default=False)] = None,
    preview: Annotated[int, typer.Option(min=0, help="Show so many samples; without --out nothing else.")] = 0,
    max_length: Annotated[
        int | None, typer.Option(min=2, help="Cut samples behind so many tokens.", show_default=False)
    ] = None,
    max_rejected: Annotated[
        float | None,
        typer.Option(min=0, max=1, help="Fail above this share; default: 0.05.", show_default=False),
    ] = None,
    chat_template: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Instead of the tokenizer's own.", show_default=False)
    ] = None,
    chat_template_kwargs: KWARGS = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes; default: one a core.", show_default=False)] = None,
    cache: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Default: DIR/cache.sqlite3.", show_default=False)
    ] = None,
) -> None:
    """Turn conversations into token ids with a mask, exactly as the target's server sees them."""
    from eyas.run.faults import plain_errors
    from eyas.ui.single import Lines

    if out is None and not preview:
        raise UserError("nothing to do: say where samples go (--out DIR), or ask for a preview (--preview 5)")
    model, kwargs, share = settings(target, run, chat_template_kwargs)
    progress = Lines()
    with plain_errors(out or Path.cwd()):
        work = importlib.import_module("eyas.corpus.work")
        orders = work.orders(model, progress, kwargs, chat_template, max_length)
        if preview:
            shown = importlib.import_module("eyas.corpus.preview").preview(data, orders, preview)
            print_samples(shown)
        if out is not None:
            share = share if max_rejected is None else max_rejected
            report = importlib.import_module("eyas.corpus.prepare").prepare(
                data, orders, out, progress, max_rejected=share, jobs=jobs, cache=cache
            )
            print(table(report))
            print(out / "samples.jsonl")


def settings(target: str | None, run: Path | None, kwargs: str | None) -> tuple[str, dict[str, Any], float]:
    """The model, its template's variables, and the share of rejects, from options or a run file. Raises UserError."""
    from eyas import config

    if (target is None) == (run is None):
        raise UserError("give either --target MODEL or --run RUNFILE")
    loaded = config.load(run) if run else None
    model = loaded.target.model if loaded else str(target)
    share = (loaded.data if loaded else config.Data()).max_rejected
    if kwargs is None:
        return model, dict(loaded.target.chat_template_kwargs) if loaded else {}, share
    try:
        given = json.loads(kwargs)
    except ValueError as error:
        raise UserError(f"--chat-template-kwargs: not valid JSON ({error})") from error
    if not isinstance(given, dict):
        raise UserError("--chat-template-kwargs: must be a JSON object")
    return model, given, share


def table(report: Mapping[str, Any]) -> str:
    """The counts of a report, as text."""
    forms = ", ".join(f"{name} {count}" for name, count in report["forms"].items())
    share = report["supervised"] / max(1, report["tokens"])
    cached = f" ({report['cached']} from the cache)" if report["cached"] else ""
    rows: list[tuple[str, Any]] = [
        ("rows read", f"{report['rows']}{cached}"),
        ("  of form", forms or "–"),
        ("rows kept", report["kept"]),
        ("samples", report["samples"]),
        ("tokens", f"{report['tokens']}, of which supervised {report['supervised']} ({share:.1%})"),
        ("exact duplicates", report["duplicates"]),
        *((f"repaired: {name}", count) for name, count in report["repairs"].items()),
        *((f"noted: {name}", count) for name, count in report["notes"].items()),
        *((f"rejected: {reason}", count) for reason, count in report["rejected"].items()),
    ]
    width = max(len(name) for name, _ in rows)
    most = max(report["lengths"].values(), default=1)
    bars = [f"  {name:>9}  {count:>9}  {'█' * round(BAR * count / most)}" for name, count in report["lengths"].items()]
    lines = [f"{name:{width}}  {value}" for name, value in rows]
    return "\n".join([*lines, "samples by tokens", *bars]) if bars else "\n".join(lines)


def print_samples(samples: Sequence[Mapping[str, Any]]) -> None:
    """Samples in colour: supervised text green, the rest dim, control tokens bold; without colour in brackets."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    coloured = console.color_system is not None
    for sample in samples:
        share = sample["supervised"] / sample["tokens"]
        console.print(
            f"{sample['source']}: {sample['tokens']} tokens, supervised {sample['supervised']} ({share:.1%})",
            markup=False,
        )
        shown = Text()
        for piece in sample["pieces"]:
            style = "green" if piece["supervised"] else "dim"
            text = piece["text"] if coloured or not piece["supervised"] else f"⟦{piece['text']}⟧"
            shown.append(text, f"bold {style}" if piece["control"] else style)
        console.print(shown)
        console.print()
