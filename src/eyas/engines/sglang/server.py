"""A server that eyas launches: its command and environment, its start, its end.

`keeper.py` stands between this process and the server, so that nothing of it is left however this process ends.
"""

import contextlib
import os
import random
import shutil
import socket
import stat
import tempfile
import time
import urllib.error
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eyas.config import Flag, Server
from eyas.engines.sglang import crash, info, kept, ship
from eyas.engines.sglang.command import Draft as Draft
from eyas.engines.sglang.command import command, environment, flags
from eyas.engines.sglang.kept import Kept
from eyas.engines.sglang.milestones import Watch
from eyas.engines.sglang.plugin.protocol import Orders, status_file
from eyas.errors import UserError
from eyas.files import plain_os_errors, read_json
from eyas.progress import Progress

HOLD_SECONDS = 60.0
ROOT_BYTES = 2**30
PORTS, PORT_TRIES = range(20000, 30000), 4


@dataclass(frozen=True)
class Endpoint:
    """Where a server is asked."""

    url: str
    root: Path | None
    """Where its plugin writes captures; None: it has no plugin."""
    status: Path | None
    """Where its plugin says that it is there."""

    def to_json(self) -> dict[str, str | None]:
        """For ready.json."""
        return {
            "url": self.url,
            "root": str(self.root) if self.root else None,
            "status": str(self.status) if self.status else None,
        }


def endpoints(ready: Mapping[str, Any]) -> list[Endpoint]:
    """The servers that a service's ready.json names."""
    return [
        Endpoint(one["url"], *(Path(one[key]) if one[key] else None for key in ("root", "status")))
        for one in ready["servers"]
    ]


@dataclass
class Running:
    """A server that answers, or answered."""

    endpoint: Endpoint
    log: Path
    seconds: dict[str, float]
    """`weights` and `graphs` by the log, `start`: from launch to the first token."""
    _kept: Kept = field(repr=False)

    @property
    def pid(self) -> int:
        """Of the server's main process."""
        return self._kept.pid

    def alive(self) -> bool:
        """Whether the server's main process runs; a busy one does."""
        return self._kept.alive()

    def why(self, python: str) -> str:
        """Why it ended, in one line."""
        code = self._kept.wait()
        return crash.cause(crash.tail(self.log), python) or crash.by_code(code)

    def stop(self) -> None:
        """End the server and every process that it started, wherever they went. Returns when all are gone."""
        self._kept.end()


class _PortTaken(UserError):  # noqa: N818
    """It did not start, since something else took its port."""


@contextlib.contextmanager
def started(
    config: Server,
    model: Path,
    dtype: str,
    folder: Path,
    progress: Progress,
    *,
    layers: tuple[int, int, int] | None = None,
    capture: bool = True,
    draft: Draft | None = None,
    extra: Mapping[str, Flag] = {},
) -> Iterator[Running]:
    """A server that gave one real token, for as long as the block lasts.

    `folder` gets log.txt, orders.json, plugin/ and status/; `layers` are hidden_states indices, None the default ones;
    `extra` are flags over the run file's. Raises UserError: it does not come up, with the cause from its log.
    """
    args = flags(config, draft, extra)
    with contextlib.ExitStack() as stack:
        with plain_os_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context((folder / "lock").open("wb"))
            mark = kept.mark_of(folder)
            kept.end_earlier(lock.fileno(), mark, folder)
            root = capture_root(config, mark) if capture else None
            if root:
                # The keeper does this too, whatever becomes of this process; but it may never start.
                stack.callback(shutil.rmtree, root, ignore_errors=True)
                _plugin(config, folder, root, layers)
            if (log := folder / "log.txt").exists():
                log.replace(folder / "log.previous.txt")
        env = environment(config, args.get("device") == "cpu", mark, folder if root else None)
        begun = time.monotonic()
        progress.milestone(f"starting {'a server with the draft' if draft else 'the server'}")

        def start() -> Running:
            port = _free_port() if config.port is None else _require_free(config.port)
            one = kept.start(command(config, model, dtype, port, args), env, log, root, lock.fileno())
            url = f"http://{_reachable(str(args.get('host') or '127.0.0.1'))}:{port}"
            return Running(Endpoint(url, root, folder / "status" if root else None), log, {}, one)

        running = start()
        stack.callback(lambda: running.stop())
        with contextlib.ExitStack() as watched:
            for left in reversed(range(PORT_TRIES)):
                watch = watched.enter_context(Watch(log, progress))
                try:
                    _first_token(running, watch, config)
                    break
                except _PortTaken:
                    # Another server that starts at the same time chose it too, for itself or for its ranks.
                    if config.port is not None or not left:
                        raise
                    running.stop()
                    watched.close()
                    log.replace(folder / "log.previous.txt")
                    root = capture_root(config, mark) if capture else None
                    progress.milestone("its port was taken meanwhile: another one")
                    running = start()
            running.seconds = {**watch.milestones.seconds, "start": round(time.monotonic() - begun, 3)}
            if running.endpoint.status:
                _require_plugin(running.endpoint.status, config.tp, log)
            progress.metric(start_seconds=running.seconds["start"])
            progress.milestone(f"server answered after {running.seconds['start']:.0f} s")
            yield running


def _plugin(config: Server, folder: Path, root: Path, layers: tuple[int, int, int] | None) -> None:
    """Put plugin and orders into place."""
    status = folder / "status"
    ship.ship(folder / "plugin")
    shutil.rmtree(status, ignore_errors=True)
    status.mkdir()
    orders = Orders(root, status.absolute(), layers, config.staging_mib * 2**20, HOLD_SECONDS)
    orders.write(folder / "orders.json")


def capture_root(config: Server, mark: str) -> Path:
    """A new, empty folder for captures that only this user may enter; what an earlier server left there is removed.

    In memory where /dev/shm has a GiB to spare, else in the folder for temporary files. Raises UserError.
    """
    base = config.captures
    if isinstance(base, list):
        if len(base) != 1:
            raise UserError("server.captures: a launched server has one capture root, name one folder")
        base = base[0]
    if base is None:
        memory = Path("/dev/shm")
        roomy = memory.is_dir() and os.access(memory, os.W_OK) and shutil.disk_usage(memory).free >= ROOT_BYTES
        base = str(memory) if roomy else tempfile.gettempdir()
    above = Path(base).absolute() / f"eyas-{os.getuid()}"
    try:
        above.mkdir(parents=True, exist_ok=True, mode=0o700)
        found = above.lstat()
    except OSError as error:
        raise _no_root(above, error) from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise UserError(
            f"{above}: others may enter or own it, captures would not be private: delete it, or set server.captures"
        )
    shutil.rmtree(above / mark, ignore_errors=True)
    try:
        (above / mark).mkdir(mode=0o700)
    except OSError as error:
        raise _no_root(above / mark, error) from error
    return above / mark


def _no_root(path: Path, error: OSError) -> UserError:
    return UserError(
        f"server.captures: cannot make {path} ({error.strerror}): name a folder in which you may write, or leave it out"
    )


def _first_token(running: Running, watch: Watch, config: Server) -> None:
    """Wait until the server gives one token. Raises UserError: it ended, refuses, or shows no sign of life."""
    while True:
        if not running.alive():
            why = running.why(config.python)
            kind = _PortTaken if why == crash.PORT_TAKEN else UserError
            raise kind(f"the server did not start: {why}; log: {running.log}")
        if one_token(running.endpoint.url, config.patience):
            return
        silent = time.monotonic() - watch.lively
        if silent > config.patience:
            raise UserError(
                f"the server shows no sign of life for {silent:.0f} s (server.patience), its last: "
                f"{watch.milestones.last[:200] or 'nothing'}; log: {running.log}"
            )
        time.sleep(0.2)


def one_token(url: str, timeout: float) -> bool:
    """Whether a server generates. A refused or broken connection, an error of its own or `timeout` are a no.

    Raises UserError: it refuses the request itself.
    """
    body = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
    try:
        answer = info.ask(url, "/generate", body, timeout)
    except urllib.error.HTTPError as error:
        if error.code in (400, 401, 403, 422):
            raise UserError(f"{url}: refuses to generate: {error.read(300).decode('utf-8', 'replace')}") from error
        return False
    except (OSError, ValueError):
        return False
    return isinstance(answer, dict) and len(answer.get("output_ids") or []) == 1


def _require_plugin(status: Path, tp: int, log: Path) -> None:
    """The plugin is there in every rank. Raises UserError."""
    for rank in range(tp):
        path = status_file(status, rank)
        if not path.exists():
            raise UserError(f"the capture plugin was not loaded by rank {rank} of the server; log: {log}")
        if problem := read_json(path).get("problem"):
            raise UserError(f"the capture plugin cannot capture from this server: {problem}; log: {log}")


def _reachable(host: str) -> str:
    return "127.0.0.1" if host in ("0.0.0.0", "::") else host


def _free_port() -> int:
    """A port below those that the system gives to outgoing connections, so that none of them takes it meanwhile."""
    for port in random.Random().sample(PORTS, len(PORTS)):
        with contextlib.suppress(UserError):
            return _require_free(port)
    raise UserError(f"no port of {PORTS.start} to {PORTS.stop} is free: name one in server.port")


def _require_free(port: int) -> int:
    with socket.socket() as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            one.bind(("127.0.0.1", port))
        except OSError as error:
            raise UserError(
                f"server.port {port} is in use: end what listens there, take another, or leave it out"
            ) from error
    return port
