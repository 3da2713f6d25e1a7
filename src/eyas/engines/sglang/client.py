"""Asks servers for captures and answers.

A capture is an ordinary request for one token, whose id tells the plugin inside the server to keep its states. Each has
an `extra_key` of its own, so that no prefix cache answers for it [sglang 4997]; the reply's `cached_tokens` proves it.
What comes back is a file under the capture root, which the caller deletes when it is done with it. Stands between the
capture step and the servers.
"""

import contextlib
import shutil
import sys
import time
import uuid
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from eyas.engines.sglang.http import Connection, ServerDied, Transient
from eyas.engines.sglang.info import ServerInfo
from eyas.engines.sglang.plugin.protocol import NAME, Wanted, status_file
from eyas.engines.sglang.pool import fan_out
from eyas.engines.sglang.server import Endpoint
from eyas.errors import UserError
from eyas.files import read_json

__all__ = [
    "Lost",
    "Reply",
    "Request",
    "ServerDied",
    "Transient",
    "ask",
    "capture",
    "check_ids",
    "discard",
    "events",
    "generate",
    "leased",
    "retried",
    "space",
    "sweep",
]

T = TypeVar("T")
TRIES = 3
PAUSE_SECONDS = 0.5
"""Before the second try; doubled before each further one."""
HOOK_SECONDS = 5.0
"""How long after its reply a capture may leave no trace."""
STALLED_SECONDS = 180.0
"""How long a file may be unfinished and not grow; the plugin itself gives up sooner."""
ALIVE_SECONDS = 3.0
"""How often is asked whether the server lives, while its file is waited for."""
CHUNKS = 4
"""Chunks of prompt under way to a server: one in the works, the others waiting behind it."""
CHUNK_TOKENS = 8192
"""Where the server says nothing of its chunks."""
KV_SHARE = 0.8
SWEEP_SECONDS = 0.02
SPACE_SHARE = 8
"""Files that nobody has deleted yet take at most 1/8 of what was free at the start."""
HELD_SECONDS = 2.0
"""How long undeleted files may keep a server idle."""
TOKEN_BYTES = 4 * 8192 * 2
"""Bytes of a token's states where the plugin does not say how wide they are."""
SERVICE_DIED = 75
"""Exit code that has the runner start service and step again (docs/seams.md)."""


@dataclass(frozen=True)
class Request:
    """Token ids whose states are wanted; `wanted.tokens` is their number."""

    wanted: Wanted
    ids: list[int]


@dataclass(frozen=True)
class Reply:
    """A finished capture."""

    request: Request
    path: Path
    """Its file; of the first rank, where every rank writes one. Its folder is the capture root."""
    token: int
    """The server's greedy next token."""
    cached: int
    seconds: float


@dataclass(frozen=True)
class Lost:
    """A request whose capture did not come about."""

    request: Request
    reason: str


@contextlib.contextmanager
def leased() -> Iterator[None]:
    """A stretch of a step that needs its service: should that die, the step ends with the exit code that says so."""
    try:
        yield
    except ServerDied as error:
        print(f"eyas: {error}", file=sys.stderr)
        raise SystemExit(SERVICE_DIED) from error


def check_ids(ids: Sequence[int], vocab_size: int, where: str) -> None:
    """Refuse ids that the target does not have: one of them can end the whole server [sglang PR 8383].

    Raises UserError that names `where`, the id and its position.
    """
    if not ids:
        raise UserError(f"{where}: no token ids")
    for position, token in enumerate(ids):
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
            raise UserError(
                f"{where}: the id {token!r} at position {position} is outside the target's vocabulary of {vocab_size}"
            )


def generate(url: str, body: dict[str, Any], timeout: float = 600.0) -> dict[str, Any]:
    """One POST to /generate, tried again where it failed for a passing reason.

    Raises UserError: refused, with the server's message, or failed three times. ServerDied.
    """
    connection = Connection(url)
    try:
        return ask(connection, body, timeout)
    finally:
        connection.close()


def ask(connection: Connection, body: dict[str, Any], timeout: float = 600.0) -> dict[str, Any]:
    """`generate` over a connection that is kept."""
    return retried(connection, lambda: _once(connection, body, timeout))


def retried(connection: Connection, once: Callable[[], T]) -> T:
    """What `once` gives, tried again after a while where it failed for a passing reason. Raises UserError: thrice."""
    for turn in range(TRIES):
        try:
            return once()
        except Transient as error:
            reason = str(error)
            connection.pause(PAUSE_SECONDS * 2**turn)
    raise UserError(f"{connection.url}: a request failed {TRIES} times, at last: {reason}")


def events(connection: Connection, body: dict[str, Any], timeout: float = 3600.0) -> list[dict[str, Any]]:
    """The events of a streamed /generate, at least one; tried again as `ask` does. Raises UserError, ServerDied."""
    for turn in range(TRIES):
        try:
            if found := list(connection.stream("/generate", {**body, "stream": True}, timeout)):
                return found
            reason = "an empty stream"
        except Transient as error:
            reason = str(error)
        connection.pause(PAUSE_SECONDS * 2**turn)
    raise UserError(f"{connection.url}: a request failed {TRIES} times, at last: {reason}")


def capture(
    endpoints: Sequence[Endpoint],
    requests: Iterable[Request],
    *,
    info: ServerInfo,
    concurrency: int,
    vocab_size: int,
) -> Generator[Reply | Lost, None, None]:
    """Send `requests` to the servers, as many at once as keep them busy; replies as they are complete.

    The bytes of files that were asked for and are not deleted yet stay below an eighth of what was free on the root's
    file system; a caller who deletes none gets one every two seconds nevertheless. Raises UserError: an id outside the
    vocabulary (before it is sent), a server too old to say what it cached. ServerDied: none is left.
    """
    assert all(endpoint.root is not None for endpoint in endpoints), "a server without the plugin"
    budget = _Budget(endpoints, info)

    def checked() -> Iterator[Request]:
        for request in requests:
            assert NAME.fullmatch(request.wanted.name), request.wanted.name
            assert request.wanted.tokens == len(request.ids)
            check_ids(request.ids, vocab_size, f"sample {request.wanted.name}")
            yield request

    def work(connection: Connection, server: int, request: Request) -> Reply | Lost:
        root = endpoints[server].root
        assert root is not None
        return _capture(connection, root, request, info.tp)

    return fan_out(
        [endpoint.url for endpoint in endpoints],
        checked(),
        work,
        concurrency=concurrency,
        admit=budget.admit,
        done=budget.done,
    )


def space(root: Path) -> int:
    """Bytes that undeleted captures under `root` may take, as things stand."""
    return shutil.disk_usage(root).free // SPACE_SHARE


def _capture(connection: Connection, root: Path, request: Request, tp: int) -> Reply | Lost:
    began, wanted, reason = time.perf_counter(), request.wanted, ""
    for turn in range(TRIES):
        if turn:
            # Another name: the server may still be busy with the first one, or hold its id for a while.
            wanted = replace(request.wanted, name=f"{request.wanted.name}-{turn + 1}")
            connection.pause(PAUSE_SECONDS * 2 ** (turn - 1))
        discard(wanted, root, tp)  # an earlier attempt's would be taken for this one's
        try:
            reply = _once(connection, _body(wanted, request.ids), 600.0)
            break
        except Transient as error:
            reason = str(error)
        except UserError as error:
            return Lost(request, str(error))
    else:
        return Lost(request, f"the request failed {TRIES} times, at last: {reason}")
    meta, token = _checked(connection.url, reply)
    problem = ""
    if meta["cached_tokens"]:
        problem = (
            f"{meta['cached_tokens']} of its {len(request.ids)} tokens came from the server's prefix cache, "
            "so their states were never computed"
        )
    elif meta["prompt_tokens"] != len(request.ids):
        problem = f"the server counts {meta['prompt_tokens']} tokens where {len(request.ids)} were sent"
    problem = problem or _await(connection, wanted, root, tp if wanted.every_rank else 1)
    if problem:
        discard(wanted, root, tp)
        return Lost(request, problem)
    return Reply(request, wanted.file(root), token, meta["cached_tokens"], time.perf_counter() - began)


def _body(wanted: Wanted, ids: list[int]) -> dict[str, Any]:
    return {
        "input_ids": ids,
        "sampling_params": {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True},
        "rid": wanted.rid,
        "extra_key": f"{wanted.name}-{uuid.uuid4().hex}",
    }


def _once(connection: Connection, body: dict[str, Any], timeout: float) -> dict[str, Any]:
    reply = connection.post("/generate", body, timeout)
    meta = reply.get("meta_info")
    finish = meta.get("finish_reason") if isinstance(meta, dict) else None
    if isinstance(finish, dict) and finish.get("type") == "abort":
        raise Transient(f"the server gave the request up ({finish.get('message', 'no reason given')})")
    return reply


def _checked(url: str, reply: dict[str, Any]) -> tuple[Mapping[str, int], int]:
    """The figures of a reply that a capture rests on, and its token. Raises UserError: they are not all there."""
    meta, ids = reply.get("meta_info"), reply.get("output_ids")
    for name in ("cached_tokens", "prompt_tokens"):
        if not isinstance(meta, dict) or not isinstance(meta.get(name), int):
            raise UserError(
                f"{url}: replies lack {name}, without which nothing is known of the prefix cache: update SGLang"
            )
    if not isinstance(ids, list) or len(ids) != 1 or not isinstance(ids[0], int):
        raise UserError(f"{url}: replies lack output_ids: update SGLang, or start it without options that hide them")
    assert isinstance(meta, dict)
    return meta, ids[0]


def _await(connection: Connection, wanted: Wanted, root: Path, ranks: int) -> str:
    """Wait until the capture's files are whole; why they will not come, else nothing. Raises ServerDied, Stopped."""
    pause, seen = 0.002, list[tuple[int, int]]()
    sign = asked = time.monotonic()
    while True:
        # In this order: a file that is finished between two looks is seen by one of them.
        partials = _written(wanted, root, ranks)
        if all(wanted.file(root, rank).exists() for rank in range(ranks)):
            return ""
        with contextlib.suppress(FileNotFoundError):
            return (
                wanted.failed(root).read_text(encoding="utf-8", errors="replace").strip()[:500]
                or f"{root} is full: free some space, or name another folder in server.captures"
            )
        now = time.monotonic()
        if partials != seen:
            sign, seen = now, partials
        silent = now - sign > (STALLED_SECONDS if partials else HOOK_SECONDS)
        if silent or now - asked > ALIVE_SECONDS:
            if not connection.lives():
                raise ServerDied(f"{connection.url} does not answer any more, a capture was not finished")
            asked = now
        if silent and partials:
            return f"the server stopped writing: its file under {root} has not grown for {STALLED_SECONDS:g} s"
        if silent:
            return (
                f"the hook did not fire: no file within {HOOK_SECONDS:g} s of the reply; is this server's capture root "
                f"{root}, and is the plugin loaded in it?"
            )
        connection.pause(pause)
        pause = min(0.05, 1.5 * pause)


def _written(wanted: Wanted, root: Path, ranks: int) -> list[tuple[int, int]]:
    """Size and time of the unfinished files."""
    found = []
    for rank in range(ranks):
        with contextlib.suppress(FileNotFoundError):
            stat = wanted.partial(root, rank).stat()
            found.append((stat.st_size, stat.st_mtime_ns))
    return found


def discard(wanted: Wanted, root: Path, ranks: int = 1) -> None:
    """Delete what a capture left behind."""
    for rank in range(ranks if wanted.every_rank else 1):
        for path in (wanted.partial(root, rank), wanted.file(root, rank)):
            path.unlink(missing_ok=True)
    wanted.failed(root).unlink(missing_ok=True)


def sweep(root: Path, prefix: str) -> None:
    """Delete all that captures left behind whose names begin with `prefix`."""
    for pattern in (f"{prefix}*", f".{prefix}*"):
        for path in root.glob(pattern):
            path.unlink(missing_ok=True)


class _Budget:
    """How much may be under way: prompt tokens to each server, bytes on each file system."""

    def __init__(self, endpoints: Sequence[Endpoint], info: ServerInfo) -> None:
        self._tokens = min(CHUNKS * (info.chunk or CHUNK_TOKENS), int(KV_SHARE * info.kv_tokens))
        self._under_way = [0] * len(endpoints)
        roots = [endpoint.root for endpoint in endpoints if endpoint.root is not None]
        self._devices = [root.stat().st_dev for root in roots]
        self._limits = {device: space(root) for device, root in zip(self._devices, roots, strict=True)}
        self._taken = dict.fromkeys(self._limits, 0)
        self._token_bytes = [_token_bytes(endpoint) for endpoint in endpoints]
        self._held_since: list[float | None] = [None] * len(endpoints)
        self._files: dict[Path, tuple[int, int]] = {}
        self._swept = 0.0

    def admit(self, server: int, request: Request, idle: bool) -> bool:
        """Whether a request may be sent now; if so it is counted."""
        device, size = self._devices[server], len(request.ids) * self._token_bytes[server]
        if not self._room(device, size):
            self._sweep()
        room = self._room(device, size)
        if not room and (not idle or self._held(server, device)):
            return False
        if not idle and self._under_way[server] + len(request.ids) > self._tokens:
            return False
        self._held_since[server] = None
        self._under_way[server] += len(request.ids)
        self._taken[device] += size
        return True

    def done(self, server: int, request: Request, result: Reply | Lost | None) -> None:
        """A request is no longer under way; its file, if there is one, counts until it is deleted."""
        device, size = self._devices[server], len(request.ids) * self._token_bytes[server]
        self._under_way[server] -= len(request.ids)
        if isinstance(result, Reply):
            self._files[result.path] = device, size
        else:
            self._taken[device] -= size

    def _held(self, server: int, device: int) -> bool:
        """Whether an idle server waits for files to be deleted: not where there is none, and not for long, since the
        caller, who is to delete them, may be waiting for a reply himself."""
        if not any(other == device for other, _ in self._files.values()):
            return False
        since = self._held_since[server] = self._held_since[server] or time.monotonic()
        return time.monotonic() - since < HELD_SECONDS

    def _room(self, device: int, size: int) -> bool:
        return self._taken[device] + size <= self._limits[device]

    def _sweep(self) -> None:
        """Find out which files are deleted; there may be many thousands."""
        if time.monotonic() < self._swept + SWEEP_SECONDS:
            return
        self._swept = time.monotonic()
        for path in [path for path in self._files if not path.exists()]:
            device, size = self._files.pop(path)
            self._taken[device] -= size


def _token_bytes(endpoint: Endpoint) -> int:
    try:
        said = read_json(status_file(endpoint.status, 0)) if endpoint.status is not None else {}
        return 4 * int(said["hidden_size"]) * (4 if said["dtype"] == "float32" else 2)
    except (OSError, UserError, KeyError, TypeError, ValueError):
        return TOKEN_BYTES
