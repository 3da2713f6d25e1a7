"""The services of an SGLang run: the target's server, launched or existing, and the server that has the draft."""

import json
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from eyas.config import Capture, Decode, Server, Target
from eyas.engines import layers as layer_ids
from eyas.engines import target as targets
from eyas.engines.sglang import info, server
from eyas.engines.sglang.command import tuned
from eyas.engines.sglang.install import status_of
from eyas.engines.sglang.plugin.protocol import status_file
from eyas.errors import UserError
from eyas.progress import Progress
from eyas.spec import StepSpec

WATCH_SECONDS = 2.0
REFUSALS = 3
"""In a row: then an existing server counts as dead. A server that is busy accepts connections all the same."""
Ready = Callable[[dict[str, Any]], None]


def serve(spec: StepSpec, out: Path, progress: Progress, ready: Ready) -> None:
    """Service entry: the target without a draft, with the capture plugin.

    Raises UserError: it cannot be brought up or captured from; RuntimeError: it died.
    """
    config, capture = spec.section(Server), spec.section(Capture)
    target = targets.read(spec.inputs["target"])
    wanted = layer_ids.resolve(capture.layers, capture.convention, target.num_layers)
    if config.url is not None:
        _existing(config, target, wanted, progress, ready)
        return
    asked = None if capture.layers == "default" else wanted
    _launched(spec, out, progress, ready, wanted=wanted, layers=asked)


def serve_plain(spec: StepSpec, out: Path, progress: Progress, ready: Ready) -> None:
    """Service entry: the target alone, without draft and plugin. Raises as `serve` does."""
    _launched(spec, out, progress, ready)


def serve_drafted(spec: StepSpec, out: Path, progress: Progress, ready: Ready) -> None:
    """Service entry: the target with the exported draft, without the plugin. Raises as `serve` does."""
    draft = server.Draft(spec.inputs["export"], spec.section(Decode).draft_tokens)
    _launched(spec, out, progress, ready, draft=draft)


def _launched(
    spec: StepSpec,
    out: Path,
    progress: Progress,
    ready: Ready,
    *,
    wanted: tuple[int, int, int] | None = None,
    layers: tuple[int, int, int] | None = None,
    draft: server.Draft | None = None,
) -> None:
    """Start a server, say that it is ready and stay until it dies. `wanted`: the layers that its plugin must take."""
    config, dtype = tuned(spec.section(Server), spec.inputs), spec.section(Target).dtype
    assert config.url is None, "an existing server is not ours to start"
    target = targets.read(spec.inputs["target"])
    capture = wanted is not None
    _end_on_sigterm()
    with server.started(
        config, target.folder, dtype, out / "server", progress, layers=layers, capture=capture, draft=draft
    ) as running:
        found = info.first(running.endpoint.url)
        if wanted is not None:
            _require(found, running.endpoint, target, wanted)
        if draft is not None and not found.speculative:
            raise UserError(f"the server started without the draft; log: {running.log}")
        _say_pool(found, progress)
        ready(_ready([running.endpoint], found, running.seconds))
        _until_it_dies(running, config)


def existing(config: Server) -> list[server.Endpoint]:
    """The servers that the run file names, each with its capture root. Raises UserError."""
    assert config.url is not None
    urls = [config.url] if isinstance(config.url, str) else config.url
    roots = [config.captures] if isinstance(config.captures, str) else config.captures or []
    if len(roots) != len(urls) or not urls:
        raise UserError(
            f"server.captures: names {len(roots)} capture roots for {len(urls)} servers in server.url; "
            "`eyas plugin DIR` makes one for a server and prints both lines"
        )
    if len({Path(root).resolve() for root in roots}) != len(roots):
        raise UserError("server.captures: two servers cannot write into one capture root; run `eyas plugin` for each")
    for url in urls:
        if not _is_address(url):
            raise UserError(f"server.url: {url!r} is no address of a server; write http://host:port")
    for root in roots:
        if not Path(root).is_dir():
            raise UserError(f"server.captures: {root} is no folder on this machine; captures are read as files")
    return [
        server.Endpoint(url.rstrip("/"), Path(root), status_of(Path(root)))
        for url, root in zip(urls, roots, strict=True)
    ]


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # An impossible port, or brackets of an IPv6 address that do not close.
        return False


def _existing(
    config: Server, target: targets.TargetInfo, wanted: tuple[int, int, int], progress: Progress, ready: Ready
) -> None:
    found = []
    for endpoint in (ends := existing(config)):
        progress.milestone(f"asking {endpoint.url}")
        if not _listens(endpoint.url):
            raise UserError(f"server.url: nothing listens at {endpoint.url}: start that server and run again")
        found.append(info.first(endpoint.url))
        if not server.one_token(endpoint.url, config.patience):
            raise UserError(f"server.url: {endpoint.url} does not generate; look into its log")
        _require(found[-1], endpoint, target, wanted)
        _say_pool(found[-1], progress)
    # The tightest one decides what may be asked of any.
    ready(_ready(ends, min(found, key=lambda one: (one.kv_tokens, one.context_length)), {}))
    refused = dict.fromkeys((endpoint.url for endpoint in ends), 0)
    while True:
        time.sleep(WATCH_SECONDS)
        for url in refused:
            refused[url] = 0 if _listens(url) else refused[url] + 1
            if refused[url] == REFUSALS:
                raise RuntimeError(f"the server at {url} has gone")


def _ready(ends: list[server.Endpoint], found: info.ServerInfo, seconds: dict[str, float]) -> dict[str, Any]:
    return {"servers": [end.to_json() for end in ends], "info": asdict(found), "seconds": seconds}


def _require(
    found: info.ServerInfo, endpoint: server.Endpoint, target: targets.TargetInfo, wanted: tuple[int, int, int]
) -> None:
    """The server serves this target and its plugin takes these layers. Raises UserError."""
    info.require_capturable(found, 0, target.vocab_size)
    assert endpoint.status is not None
    for rank in range(found.tp):
        path = status_file(endpoint.status, rank)
        try:
            said = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(
                f"{endpoint.url}: {path} is not there: rank {rank} has not loaded the capture plugin; start the server "
                "with the lines that `eyas plugin` prints"
            ) from error
        if said.get("problem"):
            raise UserError(f"{endpoint.url}: the capture plugin cannot capture: {said['problem']}")
        right_ones = {key: getattr(target, key) for key in ("num_layers", "hidden_size", "vocab_size")}
        for key, right in right_ones.items():
            if said.get(key) != right:
                raise UserError(
                    f"{endpoint.url}: serves a model with {key} {said.get(key)}, the target has {right}: name the same "
                    "model in target.model"
                )
        if tuple(said.get("layers") or ()) != wanted:
            raise UserError(
                f"{endpoint.url}: its plugin takes hidden_states {said.get('layers')}, capture.layers means "
                f"{list(wanted)}: run `eyas plugin` with the same layers and start the server again"
            )


def _say_pool(found: info.ServerInfo, progress: Progress) -> None:
    """A pool smaller than the context is legal, and a surprise in the middle of a run."""
    progress.metric(kv_tokens=found.kv_tokens, context_length=found.context_length)
    if found.kv_tokens < found.context_length:
        progress.milestone(
            f"the KV pool holds {found.kv_tokens:,} tokens, less than the context length {found.context_length:,}: "
            "longer samples are refused"
        )


def _listens(url: str) -> bool:
    """Whether anything accepts connections there. Only a refusal is a no: a busy or far server may take its time."""
    parts = urlsplit(url)
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
        socket.create_connection((parts.hostname or "", port), 5.0).close()
    except ConnectionRefusedError:
        return False
    except OSError:
        return True
    return True


def _until_it_dies(running: server.Running, config: Server) -> None:
    while running.alive():
        time.sleep(0.25)
    why = running.why(config.python)
    if why.startswith("out of memory"):
        raise UserError(f"the server died: {why}, or lower server.concurrency; log: {running.log}")
    raise RuntimeError(f"the server died: {why}; log: {running.log}")


def _end_on_sigterm() -> None:
    """Let the runner's SIGTERM end the server before this process."""

    def end(number: int, frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, end)
