"""A run on a host: shipped, started there, watched from here, its results brought home.

The runner there is an ordinary `eyas run`. Whoever started it may go away at any time; any machine that may log in can
watch it, fetch its results or stop it.
"""

import base64
import contextlib
import hashlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from eyas import config
from eyas.errors import UserError
from eyas.files import plain_os_errors, write_json
from eyas.hosts import environment, record, ship
from eyas.hosts.ssh import Link, LinkLost, patiently
from eyas.hosts.there import base
from eyas.progress import Progress
from eyas.run.protocol import printable

FAULT, DETACHED = 1, 130
RESTARTS = 3
Say = Callable[[str], None]


@dataclass(frozen=True)
class Asked:
    """What `eyas run --host` was asked to do."""

    runfile: Path
    overrides: list[str]
    options: list[str]
    """Options of `eyas run` that are for the runner there."""


def run(asked: Asked, host: str, runs: Path, progress: Progress, say: Say) -> int:
    """Ship, start, watch and fetch; returns the run's exit code, or 130 when only the watching was ended.

    Raises UserError: run file or host not fit, another run of this name under way there.
    """
    data = config.read(asked.runfile, asked.overrides)
    name = config.parse(data, str(asked.runfile)).name
    data, parcels = ship.files_of(data)
    link = Link(record.load(host))
    there = link.first_call("shelf.hello")
    code = ship.code()
    if patiently(lambda: ship.send_code(link, code), say):
        say(f"code {code.digest[:12]} shipped to {host}")
    for parcel in parcels:
        if patiently(lambda parcel=parcel: ship.send_data(link, parcel, there["rsync"], progress), say):  # type: ignore[misc]
            say(f"{', '.join(file for file, _, _ in parcel.files[:3])} shipped to {host}")
    python = environment.ready(
        link, there, code.digest, say, lambda link, job: Watching(link, job, None).until_end(say)
    )
    root = there["root"]
    text = yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=120).replace("{data}/", f"{root}/data/")
    begin = Beginning(link, name, text, code.digest, _command(python, root, name, asked.options))
    offset = begin.start(say)
    say(f"{name} runs on {host}; Ctrl-C only ends watching, `eyas stop {name} --host {host}` ends the run")
    return watch(link, name, runs, progress, say, offset, begin)


def _command(python: str, root: str, name: str, options: list[str]) -> list[str]:
    return [
        python, "-P", "-m", "eyas", "run", f"{root}/runners/{name}/run.yaml", "--runs", f"{root}/runs", "--plain",
        *options,
    ]  # fmt: skip


@dataclass(frozen=True)
class Beginning:
    """All that it takes to start a run's runner, and to start it again after the machine went down."""

    link: Link
    name: str
    text: str
    code: str
    command: list[str]

    def start(self, say: Say) -> int:
        """Start the runner, or find that this very run is under way; returns where its log begins."""
        job = {
            "code": self.code,
            "command": self.command,
            "runfile": hashlib.sha256(self.text.encode()).hexdigest(),
            "on_end": self.link.host.on_end,
        }
        did = patiently(
            lambda: self.link.call("runners.start", name=self.name, job=job, files={"run.yaml": self.text}), say
        )
        if not did["started"]:
            now = did["job"]
            if now.get("runfile") != job["runfile"]:
                raise UserError(
                    f"{self.name} is under way on {self.link.host.name} with another run file: `eyas stop {self.name} "
                    f"--host {self.link.host.name}` ends it, or give yours another name"
                )
            if now.get("code") != self.code:
                say(f"{self.name} goes on with the code that it was started with ({str(now.get('code'))[:12]})")
        return int(did["job"].get("offset", 0))


def watch(
    link: Link, name: str, runs: Path, progress: Progress, say: Say, offset: int | None = None,
    again: Beginning | None = None,
) -> int:  # fmt: skip
    """Show what the runner there says until it ends, then fetch the results; returns its exit code, 130 when detached.

    `offset` in its log: default, where the newest runner began. `again` starts a runner that is gone without a word.
    """
    watching, restarts = Watching(link, name, offset), 0
    try:
        while (code := watching.until_end(say)) is None:
            restarts += 1
            if again is None or restarts > RESTARTS:
                raise UserError(
                    f"the runner of {name} on {link.host.name} is gone without a word (was the machine started anew?): "
                    "`eyas run` with the same run file and --host goes on where it was"
                )
            say(f"the runner of {name} on {link.host.name} is gone without a word: it is started again")
            again.start(say)
        folder = fetch(link, name, runs, progress, say)
    except KeyboardInterrupt:
        say(
            f"{name} goes on on {link.host.name}: `eyas watch {name} --host {link.host.name}` shows it, "
            f"`eyas stop {name} --host {link.host.name}` ends it"
        )
        return DETACHED
    say(f"results: {folder}")
    if code < 0:
        say(f"the runner on {link.host.name} was ended by signal {-code} (no memory?): the same command goes on")
        return FAULT
    return code


class Watching:
    """Where the reader of a runner's log is."""

    def __init__(self, link: Link, name: str, offset: int | None) -> None:
        self.link, self.name, self.offset = link, name, offset

    def until_end(self, say: Say) -> int | None:
        """Print the log until the runner has ended; its exit code, None when it is gone without one."""
        if self.offset is None:
            self.offset = int(self.link.first_call("runners.state", name=self.name)["job"]["offset"])
        ended: int | None = patiently(self._once, say)
        return ended

    def _once(self) -> int | None:
        with contextlib.closing(self.link.stream("runners.follow", name=self.name, offset=self.offset)) as said:
            for line in said:
                if "log" not in line:
                    code: int | None = line["code"]
                    return code
                text = base64.b64decode(line["log"]).decode(errors="replace")
                sys.stdout.write("".join(c for c in text if c.isprintable() or c == "\n"))
                sys.stdout.flush()
                self.offset = line["offset"]
        raise LinkLost("closed early")


def home(runs: Path, name: str, host: str) -> Path:
    """Where the results of a run on a host come to lie here."""
    return runs / f"{name}@{host}"


def fetch(link: Link, name: str, runs: Path, progress: Progress, say: Say) -> Path:
    """Bring the results home, each file verified; what is here already does not come again."""
    folder = home(runs, name, link.host.name)
    with plain_os_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        listed = patiently(lambda: link.call("results.results", name=name), say)
        missing = [file for file in listed["files"] if not _is_here(folder / file[0], file[2])]
        progress.total(sum(size for _, size, _ in missing), "bytes")
        if missing:
            patiently(lambda: _bring(link, name, folder, missing, progress), say)
        write_json(folder / "host.json", {"host": link.host.name, "folder": listed["folder"]})
    return folder


def _is_here(path: Path, sha: str) -> bool:
    return path.is_file() and base.file_digest(path) == sha


def _bring(link: Link, name: str, folder: Path, files: list[tuple[str, int, str]], progress: Progress) -> None:
    """Files, each on from what an earlier attempt brought. Raises LinkLost, UserError: one changed meanwhile."""
    partials = {file: _partial(folder, link.host.name, file, sha) for file, _, sha in files}
    wanted = [[file, path.stat().st_size] for file, path in partials.items()]
    with contextlib.closing(link.stream("results.read", name=name, files=wanted)) as said:
        for line in said:
            data = base64.b64decode(line.get("data", ""))
            if data:
                with partials[line["file"]].open("ab") as out:
                    out.write(data)
                progress.advance(len(data))
    for file, _, sha in files:
        if base.file_digest(partials[file]) != sha:
            partials[file].unlink()
            raise UserError(f"{folder / file}: changed there while it was fetched: `eyas watch` fetches it again")
        partials[file].replace(folder / file)


def _partial(folder: Path, host: str, file: str, sha: str) -> Path:
    """Where a result is gathered; made if it is not there. Raises UserError: a name that leads elsewhere."""
    if file.startswith("/") or ".." in Path(file).parts:
        raise UserError(f"{host}: {printable(file)} is no name of a result")
    path = folder / file
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{sha[:12]}.partial")
    partial.touch()
    return partial


def attach(host: str, name: str, runs: Path, progress: Progress, say: Say) -> int:
    """Watch a run that anybody started there, from where its newest runner began; see `watch`."""
    return watch(Link(record.load(host)), name, runs, progress, say)


def stop(host: str, name: str, say: Say) -> int:
    """End the runner there and everything that it started."""
    link = Link(record.load(host))
    link.first_call("runners.state", name=name)
    patiently(lambda: link.call("runners.stop", name=name), say)
    return _ours(link, name, ["stop"], say)


def status(host: str, name: str, as_json: bool, say: Say) -> int:
    """What `eyas status` says there."""
    return _ours(Link(record.load(host)), name, ["status", *(["--json"] if as_json else [])], say)


def _ours(link: Link, name: str, command: list[str], say: Say) -> int:
    link.first_call("runners.state", name=name)
    did: dict[str, Any] = patiently(lambda: link.call("runners.ours", name=name, command=command), say)
    print(did["said"].rstrip())
    return int(did["code"])
