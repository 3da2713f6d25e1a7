"""`eyas store`: the commands for captured states on disk. What they do is in `store/tend.py`."""

import importlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from eyas.errors import UserError
from eyas.room import size

commands = typer.Typer(help="Look after captured states on disk.", no_args_is_help=True, rich_markup_mode=None)
Place = Annotated[
    Path, typer.Argument(metavar="STORE|RUN", help="A store's folder, or a run folder.", show_default=False)
]
AsJson = Annotated[bool, typer.Option("--json", help="For programs.")]


@commands.command()
def ls(
    place: Place,
    samples: Annotated[bool, typer.Option("--samples", help="Every sample: key, tokens, digest, shard.")] = False,
    as_json: AsJson = False,
) -> None:
    """List the stores with their shards, or all samples."""
    found = {str(folder): (_tend().samples if samples else _tend().shards)(folder) for folder in _find(place)}
    if as_json:
        return print(json.dumps(found, indent=1))
    for folder, rows in found.items():
        print(folder)
        for row in rows:
            if samples:
                print(f"  {row['key']}  {row['tokens']:7}  {row['digest']}  {row['shard']}")
            else:
                print(f"  {row['file']}  {row['samples']:7} samples  {row['tokens']:10} tokens  {size(row['bytes'])}")
    return None


@commands.command()
def stats(place: Place, as_json: AsJson = False) -> None:
    """Say what the stores hold: contract, counts, bytes a token."""
    found = {str(folder): _tend().stats(folder) for folder in _find(place)}
    print(json.dumps(found, indent=1) if as_json else "\n".join(_lines(found)))


@commands.command()
def verify(place: Place) -> None:
    """Read everything and compare digests; exit code 1: something is damaged."""
    from eyas.ui.single import Lines

    problems = [line for folder in _find(place) for line in _tend().verify(folder, Lines())]
    print("\n".join(problems) or "all samples are whole")
    raise typer.Exit(1 if problems else 0)


@commands.command()
def repair(folder: Annotated[Path, typer.Argument(metavar="STORE", show_default=False)]) -> None:
    """Take damaged samples out of a store; capturing again brings them back."""
    from eyas.run.faults import plain_errors
    from eyas.ui.single import Lines

    with plain_errors(folder):
        found = _tend().repair(folder, Lines())
    print(f"{found['kept']} samples kept, {len(found['damaged'])} damaged, {found['lost']} lost with their shards")
    print("\n".join(found["damaged"]), end="\n" * bool(found["damaged"]))


@commands.command()
def merge(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A folder that is not there yet.", show_default=False)],
    stores: Annotated[list[Path], typer.Argument(metavar="STORE...", show_default=False)],
) -> None:
    """Make one store of several with the same contract; a sample that is in two comes once."""
    from eyas.run.faults import plain_errors
    from eyas.ui.single import Lines

    with plain_errors(out):
        found = _tend().merge(out, stores, Lines())
    print(f"{out}: {found['samples']} samples, {found['duplicates']} duplicates left out")


@commands.command()
def rm(place: Place) -> None:
    """Delete stores; of a run: all states, while its figures and drafts stay."""
    from eyas.run import retention
    from eyas.run.faults import plain_errors

    with plain_errors(place):
        if (place / "plan.json").is_file():
            freed = retention.release(place)  # also what answers and captures in progress hold
        else:
            stores = _find(place)
            between = {above for store in stores for above in store.parents if place in above.parents}
            if any((folder / "plan.json").is_file() for folder in between):
                raise UserError(f"{place}: holds runs; name one of them, or a store: each is deleted by itself")
            freed = sum(_tend().remove(folder) for folder in stores)
    print(f"{size(freed)} freed")


def _lines(found: dict[str, Any]) -> Iterable[str]:
    for folder, about in found.items():
        contract, lengths = about["contract"], about["lengths"]
        yield folder
        yield (
            f"  {about['samples']} samples, {about['tokens']} tokens ({about['supervised']} of answers), "
            f"{size(about['bytes'])} in {about['shards']} shards: {about['bytes_per_token']:,.0f} bytes a token"
        )
        yield (
            f"  {lengths['shortest']} to {lengths['longest']} tokens a sample, median {lengths['median']:g}; "
            f"{about['of_padded']:.2f} of what padded batches in bfloat16 take"
        )
        yield (
            f"  {contract['dtype']}, width {contract['hidden_size']}, layers {contract['layers']}, from "
            f"{contract['engine']} {contract['engine_version']}, target {contract['model_digest'][:12]}"
        )
        if about["quarantined"]:
            counts = ", ".join(f"{reason} {count}" for reason, count in about["quarantined"].items())
            yield f"  not there: {counts}"


def _find(place: Path) -> list[Path]:
    found: list[Path] = _tend().find(place)
    return found


def _tend() -> Any:
    return importlib.import_module("eyas.store.tend")
