"""The commands. Each imports what it needs when it runs, so that `eyas --help` answers at once."""

import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from eyas import __version__
from eyas.errors import UserError

if TYPE_CHECKING:
    from eyas.config import RunConfig
    from eyas.plan.digests import Plan
    from eyas.run.view import Watcher

app = typer.Typer(
    help="From a served language model to a verified EAGLE-3 draft model.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
RunFile = Annotated[Path, typer.Argument(help="A run file; see recipes/.", show_default=False)]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[A.B=VALUE]...", help="Single fields of the run file, as train.epochs=3.")
]
Runs = Annotated[Path, typer.Option("--runs", metavar="DIR", help="Where run folders are.")]
Run = Annotated[
    Path, typer.Argument(metavar="RUN", help="A run folder, or the name of one in runs/.", show_default=False)
]


def main() -> None:
    """Run the command line: a UserError becomes one line and exit code 2."""
    from eyas.run.faults import missing_extra
    from eyas.run.protocol import printable

    try:
        try:
            app()
        except ImportError as error:
            if plain := missing_extra(error):
                raise plain from error
            raise
    except UserError as error:
        print(f"eyas: {printable(str(error), 2000)}", file=sys.stderr)
        sys.exit(2)


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        print(f"eyas {__version__}")
        raise typer.Exit()


@app.command()
def run(
    runfile: RunFile,
    overrides: Overrides = None,
    runs: Runs = Path("runs"),
    plain: Annotated[bool, typer.Option("--plain", help="Lines instead of the live table.")] = False,
) -> None:
    """Run a run file, or continue it: what is finished and undamaged is not run again."""
    from eyas.run import session
    from eyas.run.executor import STOPPED
    from eyas.ui.summary import summary

    config, plan = _plan(runfile, overrides)
    folder = runs / config.name
    outcome = session.run(folder, plan, config.model_dump(mode="json"), _watcher(plain))
    for note in outcome.notes:
        print(f"eyas: {note}", file=sys.stderr)
    if outcome.code == STOPPED:
        print("eyas: stopped; what is finished is kept: run the same command again to go on", file=sys.stderr)
    else:
        print(summary(folder, outcome.seconds))
    raise typer.Exit(outcome.code)


@app.command()
def plan(runfile: RunFile, overrides: Overrides = None, runs: Runs = Path("runs")) -> None:
    """Show what `eyas run` would do: which steps are finished, which would run, and why. Nothing is started."""
    from eyas.ui.overview import planned

    config, made = _plan(runfile, overrides)
    print(planned(runs / config.name, made))


@app.command()
def status(run: Run, as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False) -> None:
    """Show how far a run is."""
    import json

    from eyas.ui.overview import as_text, read_status

    state = read_status(_folder(run))
    print(json.dumps(state, indent=1, ensure_ascii=False) if as_json else as_text(state))


@app.command()
def report(run: Run) -> None:
    """Build report.html again."""
    from eyas.files import plain_os_errors
    from eyas.run import session

    folder = _folder(run)
    with plain_os_errors(folder):
        session.report(folder)
    print(folder / "report.html")


@app.command()
def replay(
    draft: Annotated[Path, typer.Argument(help="Folder of an exported draft.", show_default=False)],
    target: Annotated[str, typer.Option(help="The model it drafts for: a folder or a name.", show_default=False)],
    prompts: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="A file or `builtin`; default: the draft's own.", show_default=False),
    ] = None,
    draft_tokens: Annotated[int, typer.Option(min=1, max=16, help="Tokens drafted in each step.")] = 3,
    limit: Annotated[
        int | None, typer.Option(min=1, help="How many prompts; default: the draft's own.", show_default=False)
    ] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=2, help="Longest answer, in tokens; default: the draft's own.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Predict the accept length of any draft, in-process."""
    import json

    from eyas.run.faults import plain_errors
    from eyas.ui.single import Lines
    from eyas.ui.summary import acceptance

    with plain_errors(draft):
        found = importlib.import_module("eyas.decode.predict").predict(
            draft=draft,
            target=target,
            prompts=prompts,
            draft_tokens=draft_tokens,
            limit=limit,
            max_new_tokens=max_new_tokens,
            progress=Lines(),
        )
    print(json.dumps(found, indent=1) if as_json else acceptance(found))


@app.command()
def doctor(
    runfile: RunFile,
    overrides: Overrides = None,
    twin_only: Annotated[
        bool, typer.Option("--twin-only", help="Only the tiny model; the target is not loaded.")
    ] = False,
    skip_twin: Annotated[bool, typer.Option("--skip-twin", help="Only the server.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Examine an SGLang server, before that a tiny twin of the target; exit code 1: a check failed."""
    import json

    from eyas import config
    from eyas.run.faults import plain_errors
    from eyas.ui.checks import table
    from eyas.ui.single import Lines

    loaded = config.load(runfile, overrides)
    if loaded.engine.kind != "sglang":
        raise UserError(
            f"{runfile}: engine.kind is {loaded.engine.kind}; doctor examines SGLang: set engine.kind=sglang"
        )
    if twin_only and (skip_twin or not loaded.server.twin):
        raise UserError("--twin-only leaves nothing to do: the twin is skipped, by --skip-twin or by server.twin")
    with plain_errors(runfile):
        found = importlib.import_module("eyas.engines.sglang.doctor").examine(
            loaded, Lines(), prove=not skip_twin, serve=not twin_only
        )
    print(json.dumps(found, indent=1, ensure_ascii=False) if as_json else table(found))
    raise typer.Exit(1 if any(check["passed"] is False for check in found["checks"]) else 0)


@app.command()
def tune(
    runfile: RunFile,
    overrides: Overrides = None,
    runs: Runs = Path("runs"),
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Find the target's best plain SGLang configuration for tune.goal; finished trials are kept when it is stopped."""
    import json

    from rich.console import Console

    from eyas import config
    from eyas.report import tuned as plot
    from eyas.run import lock
    from eyas.run.faults import plain_errors
    from eyas.ui import tuned
    from eyas.ui.single import Lines

    loaded = config.load(runfile, overrides)
    folder = runs / loaded.name / "tune"
    with plain_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with lock.hold(folder.parent):
            try:
                found = importlib.import_module("eyas.bench.tune.tune").run(loaded, folder, Lines())
            except KeyboardInterrupt:
                print("eyas: stopped; finished trials are kept: run the same command again to go on", file=sys.stderr)
                raise typer.Exit(130) from None
            drawn = plot.write_plot(found, folder / "tune.svg")
    if as_json:
        print(json.dumps(found, indent=1, ensure_ascii=False))
    else:
        tuned.show(found, Console(width=None if sys.stdout.isatty() else 120))
        print("Files     ", folder / "tune.json", *([folder / "tune.svg"] if drawn else []))


@app.command()
def init(
    launch: Annotated[Path, typer.Option(metavar="LAUNCH.SH", help="A script that starts SGLang.", show_default=False)],
    out: Annotated[Path | None, typer.Option(metavar="RUN.YAML", help="Default: print it.", show_default=False)] = None,
) -> None:
    """Make a run file from the script that starts your server."""
    import os

    from eyas.files import plain_os_errors

    text = importlib.import_module("eyas.engines.sglang.launchscript").convert(launch, os.environ)
    if out is None:
        print(text, end="")
        return
    with plain_os_errors(out):
        try:
            with out.open("x", encoding="utf-8") as file:
                file.write(text)
        except FileExistsError:
            raise UserError(f"{out} is there already: choose another name or delete it") from None
        except FileNotFoundError:
            raise UserError(f"{out.parent}: no such folder") from None
    print(out)


@app.command()
def plugin(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where to put it.", show_default=False)],
    layers: Annotated[str, typer.Option(metavar="default|A,B,C", help="As capture.layers.")] = "default",
    convention: Annotated[str, typer.Option(help="As capture.convention.")] = "hidden_states",
    captures: Annotated[
        Path | None, typer.Option(metavar="ROOT", help="Where states go; default: DIR/captures.", show_default=False)
    ] = None,
) -> None:
    """Put the capture plugin into a folder, for a server that you start yourself."""
    print(importlib.import_module("eyas.engines.sglang.install").install(folder, layers, convention, captures))


def _plan(runfile: Path, overrides: list[str] | None) -> "tuple[RunConfig, Plan]":
    from eyas import config
    from eyas.plan import digests, graph

    loaded = config.load(runfile, overrides)
    return loaded, digests.make(
        graph.build(loaded), loaded.model_dump(mode="json"), loaded.seed, graph.build_services(loaded)
    )


def _folder(run: Path) -> Path:
    for folder in (run, Path("runs") / run):
        if (folder / "plan.json").is_file():
            return folder
    raise UserError(f"{run} is no run folder (it has no plan.json); give its path, for example runs/demo")


def _watcher(plain: bool) -> "Watcher":
    if not plain and sys.stdout.isatty():
        from rich.console import Console

        from eyas.ui.live import Live

        console = Console()
        if not console.is_dumb_terminal:
            return Live(console)
    from eyas.ui.plain import Plain

    return Plain()
