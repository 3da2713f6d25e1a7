"""The commands. Each imports what it needs when it runs, so that `eyas --help` answers at once."""

import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from eyas import __version__
from eyas.errors import UserError
from eyas.hosts.commands import app as host_app
from eyas.ui import data, regenerate
from eyas.ui.store import commands as store_commands

if TYPE_CHECKING:
    from eyas.config import RunConfig
    from eyas.plan.digests import Plan
    from eyas.run.keep import Choice, Make
    from eyas.run.view import Watcher

app = typer.Typer(
    help="From a served language model to a verified EAGLE-3 draft model.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(store_commands, name="store")
app.add_typer(host_app, name="host")
RunFile = Annotated[Path, typer.Argument(help="A run file; see recipes/.", show_default=False)]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[A.B=VALUE]...", help="Single fields of the run file, as train.epochs=3.")
]
Runs = Annotated[Path, typer.Option("--runs", metavar="DIR", help="Where run folders are.")]
Run = Annotated[
    Path, typer.Argument(metavar="RUN", help="A run folder, or the name of one in runs/.", show_default=False)
]
Host = Annotated[str | None, typer.Option(metavar="NAME", help="On this host; see `eyas host`.", show_default=False)]


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
    hold: Annotated[
        float,
        typer.Option("--hold-on-failure", metavar="MINUTES", min=0, help="How long a server outlives a failed step."),
    ] = 30.0,
    redo: Annotated[bool, typer.Option("--redo", help="Run again what is finished but whose code changed.")] = False,
    keep: Annotated[
        list[str] | None, typer.Option(metavar="STEP", help="Keep its output though its code changed; repeatable.")
    ] = None,
    host: Host = None,
) -> None:
    """Run a run file, or continue it: what is finished and undamaged is not run again."""
    if host is not None:
        from eyas.hosts import remote
        from eyas.ui.single import Lines, say

        options = ["--hold-on-failure", str(hold), *["--redo"] * redo, *(f"--keep={step}" for step in keep or [])]
        asked = remote.Asked(runfile, overrides or [], options)
        raise typer.Exit(remote.run(asked, host, runs, Lines(), say))
    from eyas.run import session
    from eyas.run.executor import STOPPED
    from eyas.ui.summary import summary

    config, make = _plan(runfile, overrides)
    folder = runs / config.name
    plan = make(None) if redo else _keeping(folder, make, keep or [])
    outcome = session.run(folder, plan, config.model_dump(mode="json"), _watcher(plain), 60 * hold)
    for note in outcome.notes:
        print(f"eyas: {note}", file=sys.stderr)
    if outcome.code == STOPPED:
        print("eyas: stopped; what is finished is kept: run the same command again to go on", file=sys.stderr)
    else:
        print(summary(folder, outcome.seconds))
    raise typer.Exit(outcome.code)


@app.command()
def plan(
    runfile: RunFile,
    overrides: Overrides = None,
    runs: Runs = Path("runs"),
    host: Host = None,
    probe: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A recorded probe, as a host's.", show_default=False)
    ] = None,
) -> None:
    """Show what `eyas run` would do: which steps are finished, which would run, and why. Nothing is started."""
    from eyas.run import keep
    from eyas.ui.budget import budget
    from eyas.ui.overview import planned

    config, make = _plan(runfile, overrides)
    folder = runs / config.name
    choice = keep.choose(folder, make)
    rows = planned(folder, choice.undecided, config.model_dump(mode="json"))
    print("\n".join([rows, *budget(folder, config, choice.undecided)]))
    if choice.open:
        print(_changed(choice))
    if host is not None or probe is not None:
        from eyas.hosts import look

        print("\n".join(look.fit(config, host, probe)))


@app.command()
def status(
    run: Run, as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False, host: Host = None
) -> None:
    """Show how far a run is."""
    import json

    if host is not None:
        from eyas.hosts import remote
        from eyas.ui.single import say

        raise typer.Exit(remote.status(host, run.name, as_json, say))
    from eyas.ui.overview import as_text, read_status

    state = read_status(_folder(run))
    print(json.dumps(state, indent=1, ensure_ascii=False) if as_json else as_text(state))


@app.command()
def watch(
    run: Run,
    plain: Annotated[bool, typer.Option("--plain", help="Lines instead of the live table.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="What `status --json` gives, a line a second.")] = False,
    host: Host = None,
    runs: Runs = Path("runs"),
) -> None:
    """Watch a run from anywhere, until its runner ends; Ctrl-C leaves it alone. On a host, fetch its results then."""
    if host is not None:
        from eyas.hosts import remote
        from eyas.ui.single import Lines, say

        raise typer.Exit(remote.attach(host, run.name, runs, Lines(), say))
    from eyas.ui import overview, watch

    if as_json:
        overview.print_lines(_folder(run))
    else:
        watch.watch(_folder(run), _watcher(plain))


@app.command()
def stop(run: Run, host: Host = None) -> None:
    """End a run and everything that it started; what is finished is kept, and the same command goes on."""
    from eyas.run.stop import stop

    if host is not None:
        from eyas.hosts import remote
        from eyas.ui.single import say

        raise typer.Exit(remote.stop(host, run.name, say))
    ended = stop(_folder(run))
    print(f"ended: {', '.join(ended)}" if ended else "nothing was running")


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
def verify(
    draft: Annotated[Path, typer.Argument(help="Folder of a draft, anyone's.", show_default=False)],
    target: Annotated[str, typer.Option(help="The model it drafts for: a folder or a name.", show_default=False)],
    python: Annotated[
        str | None, typer.Option(metavar="PYTHON", help="An interpreter whose SGLang is asked.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Check a draft's files against its target, without running either; exit code 2: a check failed."""
    import json

    from eyas.run.faults import plain_errors
    from eyas.ui.checks import table
    from eyas.ui.single import Lines

    with plain_errors(draft):
        found = importlib.import_module("eyas.draft.verify").verify(draft, target, python, Lines())
    print(json.dumps(found, indent=1, ensure_ascii=False) if as_json else table(found))
    failed = list(dict.fromkeys(check["name"] for check in found["checks"] if check["passed"] is False))
    if failed:
        raise UserError(f"{draft}: {', '.join(failed)} failed; the table says how to mend it")


@app.command()
def diagnose(
    draft: Annotated[Path, typer.Argument(help="Folder of a draft, anyone's.", show_default=False)],
    target: Annotated[str, typer.Option(help="The model it drafts for: a folder or a name.", show_default=False)],
    prompts: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="A file or `builtin`; default: the draft's own.", show_default=False),
    ] = None,
    served: Annotated[
        str | None,
        typer.Option(metavar="LENGTH|FILE", help="Accept length on your server, or its JSON.", show_default=False),
    ] = None,
    revision: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Another version of the target, to be tried.", show_default=False),
    ] = None,
    draft_tokens: Annotated[int, typer.Option(min=1, max=16, help="Tokens drafted in each step.")] = 3,
    limit: Annotated[int | None, typer.Option(min=1, help="How many prompts; default: 48.", show_default=False)] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=2, help="Longest answer, in tokens; default: 128.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Find out by experiment why a draft is accepted less than it should be."""
    import json

    from eyas.run.faults import plain_errors
    from eyas.ui.diagnosis import as_text
    from eyas.ui.single import Lines

    with plain_errors(draft):
        found = importlib.import_module("eyas.bench.cases").of_folder(
            draft=draft,
            target=target,
            prompts=prompts,
            served=served,
            revision=revision,
            draft_tokens=draft_tokens,
            limit=limit,
            max_new_tokens=max_new_tokens,
            progress=Lines(),
        )
    print(json.dumps(found, indent=1, ensure_ascii=False) if as_json else as_text(found))


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
def bench(
    url: Annotated[str, typer.Argument(metavar="URL", help="A running SGLang or vLLM server.", show_default=False)],
    against: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Another one, measured in turns: with the draft.", show_default=False),
    ] = None,
    target: Annotated[
        str | None, typer.Option(help="Its model, a folder or a name; default: the server's own.", show_default=False)
    ] = None,
    workload: Annotated[
        list[str] | None,
        typer.Option(
            help="heldout (the default), humaneval, a .jsonl or .txt file; NAME@N: of N tokens; repeatable.",
            show_default=False,
        ),
    ] = None,
    concurrency: Annotated[str, typer.Option(metavar="N,...", help="Requests at once.")] = "1",
    temperature: Annotated[str, typer.Option(metavar="T,...", help="0: greedy.")] = "0",
    prompts: Annotated[int, typer.Option(help="Of each workload, in each round.")] = 16,
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.")] = 128,
    rounds: Annotated[int, typer.Option(help="How often each figure is taken.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Measure running servers: speed, latency, and what a draft gains."""
    import json

    from eyas import config
    from eyas.run.faults import plain_errors
    from eyas.ui.bench import table
    from eyas.ui.single import Lines

    asked = {
        "workloads": workload or ["heldout"],
        "concurrencies": _numbers("--concurrency", concurrency, int),
        "temperatures": _numbers("--temperature", temperature, float),
        "prompts": prompts,
        "max_new_tokens": max_new_tokens,
        "rounds": rounds,
    }
    section = config.parse({"name": "bench", "target": {"model": target or url}, "bench": asked}, "eyas bench").bench
    with plain_errors(Path.cwd()):
        found = importlib.import_module("eyas.bench.command").bench(url, against, target, section, Lines())
    print(json.dumps(found, indent=1, ensure_ascii=False) if as_json else table(found))


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
                try:
                    file.write(text)
                    file.flush()
                except OSError:
                    out.unlink(missing_ok=True)
                    raise
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


app.command()(data.prepare)
app.command()(regenerate.regenerate)


def _plan(runfile: Path, overrides: list[str] | None) -> "tuple[RunConfig, Make]":
    """The run file, and what makes its plan."""
    from eyas import config
    from eyas.plan import digests, graph

    loaded = config.load(runfile, overrides)
    steps, services = graph.build(loaded), graph.build_services(loaded)
    return loaded, lambda keep: digests.make(steps, loaded.model_dump(mode="json"), loaded.seed, services, keep)


def _keeping(folder: Path, make: "Make", asked: list[str]) -> "Plan":
    """The plan to run: what is finished but for its code is kept, if `--keep` or the user says so."""
    from eyas.run import keep

    choice = keep.choose(folder, make, asked or None)
    keep.refuse_unknown(choice.plan, asked)
    if not asked and not choice.open:
        return choice.undecided
    if not asked:
        if not sys.stdin.isatty():
            raise UserError(_changed(choice))
        if not typer.confirm(f"{_changed(choice)}\nKeep them?", default=True):
            return choice.plain
    keep.decide(folder, choice)
    return choice.plan


def _changed(choice: "Choice") -> str:
    from eyas.ui.text import duration

    again = ", ".join(f"{name} ({duration(seconds)})" for name, seconds in choice.lost.items())
    options = " ".join(f"--keep {name}" for name in choice.asked)
    return (
        f"the code of {', '.join(choice.asked)} changed, nothing else: --redo runs again {again}, "
        f"{duration(choice.seconds)} in all; {options} keeps what is finished"
    )


def _numbers(option: str, text: str, kind: type[int] | type[float]) -> list[float]:
    """`1,8,64`. Raises UserError."""
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"{option} {text}: write numbers with commas between them, as 1,8") from None


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
