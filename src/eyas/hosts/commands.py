"""`eyas host …`: what the command line asks of hosts. Imports the rest when a command runs."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Machines behind SSH on which runs can be.", no_args_is_help=True, rich_markup_mode=None)
Name = Annotated[str, typer.Argument(metavar="NAME", help="A host that was added.", show_default=False)]


@app.command()
def add(
    name: Annotated[str, typer.Argument(metavar="NAME", help="What to call it.", show_default=False)],
    root: Annotated[str, typer.Option(metavar="DIR", help="Folder there, on a disk that stays.", show_default=False)],
    ssh: Annotated[
        str | None, typer.Option(metavar="[USER@]HOST", help="For ssh; default: NAME.", show_default=False)
    ] = None,
    python: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Your interpreter there; default: one is set up.", show_default=False),
    ] = None,
    ssh_config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Instead of ~/.ssh/config.", show_default=False)
    ] = None,
    multiplex: Annotated[bool, typer.Option(help="Share one connection.")] = True,
    bandwidth: Annotated[
        int | None, typer.Option(metavar="KIB", min=1, help="Most KiB a second for data.", show_default=False)
    ] = None,
    wheels: Annotated[
        str | None, typer.Option(metavar="DIR", help="Folder there with wheels, for no network.", show_default=False)
    ] = None,
    lasting: Annotated[
        bool, typer.Option("--lasting/--passing", help="--passing: DIR may be lost with a container.")
    ] = True,
    on_end: Annotated[
        str | None, typer.Option(metavar="COMMAND", help="Run there when a run has ended.", show_default=False)
    ] = None,
) -> None:
    """Make a host known, or change what is known of it. Nothing is asked there yet."""
    from eyas.hosts import record

    values = {
        "name": name, "ssh": ssh or name, "root": root, "python": python, "multiplex": multiplex, "wheels": wheels,
        "ssh_config": str(ssh_config.expanduser().absolute()) if ssh_config else None, "bandwidth_kib": bandwidth,
        "lasting": lasting, "on_end": on_end,
    }  # fmt: skip
    print(record.save(record.make(values, f"host {name}")))


@app.command("list")
def list_() -> None:
    """The hosts that are known."""
    from eyas.hosts import record

    for name in record.names():
        host, found = record.load(name), record.last_probe(name)
        when = f"probed {found['time']}" if found else "not probed"
        print(f"{name:16}  {host.ssh}:{host.root}  {when}")


@app.command()
def remove(name: Name) -> None:
    """Forget a host; what lies there stays."""
    from eyas.hosts import record

    record.remove(name)


@app.command()
def probe(
    name: Name,
    interpreter: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE", help="Another interpreter there, as the one with SGLang; repeatable."),
    ] = None,
    path: Annotated[
        list[str] | None, typer.Option(metavar="PATH", help="A model or file there; repeatable.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Look at what a host has, and keep that for `eyas plan --host`."""
    import json

    from eyas.hosts import look

    found = look.probe(name, interpreter or [], path or [])
    print(json.dumps(found, indent=1, ensure_ascii=False) if as_json else look.as_text(found))


@app.command()
def trust(
    name: Name,
    fingerprint: Annotated[
        str | None, typer.Option(metavar="SHA256:…", help="Trust this one without asking.", show_default=False)
    ] = None,
) -> None:
    """Show the fingerprint of a host's key, and take it into known_hosts if you say so."""
    from eyas.errors import UserError
    from eyas.files import plain_os_errors
    from eyas.hosts import record
    from eyas.hosts import trust as keys

    key = keys.offered(record.load(name))
    print("\n".join(key.fingerprints))
    if fingerprint is None:
        typer.confirm(f"Is this what who runs {name} told you? Then it is written to {key.known_hosts}", abort=True)
    elif not any(fingerprint in line.split() for line in key.fingerprints):
        raise UserError(f"{name} shows another key than {fingerprint}: nothing was changed")
    with plain_os_errors(key.known_hosts):
        keys.trust(key)
