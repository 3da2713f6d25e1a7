"""What a server says of itself, and whether states can be captured from it."""

import http.client
import json
import socket
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.engines.sglang.http import ServerDied
from eyas.errors import UserError

# A proxy of the environment stands between us and the internet, not between us and a server that a user named.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
PATIENCE_SECONDS = 300.0
"""For a server that is too busy to say who it is, as long as it accepts connections."""
BROKEN_TRIES, PAUSE_SECONDS = 3, 0.5
NOT_FOUND = (404, 405, 501)
REMEDY = "start the server without it (server.args, or your own command)"


@dataclass(frozen=True)
class ServerInfo:
    """Figures of one running server."""

    version: str
    model_path: str
    context_length: int
    kv_tokens: int
    """Size of the KV pool, of each data-parallel replica."""
    chunk: int | None
    """Prompts longer than this are prefilled in pieces; None: never."""
    tp: int
    dp: int
    dp_attention: bool
    pp: int
    speculative: str | None
    radix: bool
    """Whether prefixes of earlier requests are kept and used again."""
    vocab_size: int | None
    """None where the model's config.json cannot be read from here."""
    dtype: str
    max_running: int | None
    longest_input: int | None = None
    """Prompts of this many tokens and more are refused by the server."""
    splits: tuple[str, ...] = ()
    """Flags in use that divide one request's tokens between processes."""


def ask(url: str, path: str, body: dict[str, Any] | None = None, timeout: float = 30.0) -> Any:
    """GET, or POST of a JSON body; the JSON answer. Raises OSError (HTTPError too), ValueError: not JSON."""
    data = json.dumps(body).encode() if body is not None else None
    request = urllib.request.Request(url.rstrip("/") + path, data, {"Content-Type": "application/json"})
    with _OPENER.open(request, timeout=timeout) as answer:
        return json.loads(answer.read())


def read(url: str) -> ServerInfo:
    """Ask a server that serves, as patiently as a busy one needs.

    Raises UserError: it is not SGLang, or refuses; ServerDied: nothing answers there any more.
    """
    deadline, broken = time.monotonic() + PATIENCE_SECONDS, 0
    while True:
        try:
            return _asked(url)
        except urllib.error.HTTPError as error:
            if error.code in NOT_FOUND:
                raise _no_sglang(url, error) from error
            if error.code < 500 or time.monotonic() > deadline:
                raise UserError(f"{url}: does not say what it serves (HTTP {error.code} {error.reason})") from error
        except (OSError, http.client.IncompleteRead) as error:
            reason = error.reason if isinstance(error, urllib.error.URLError) else error
            said = f"{type(reason).__name__}: {reason}"
            if isinstance(reason, socket.gaierror):
                raise UserError(f"{url}: this host is not known here ({reason.strerror})") from error
            broken += not isinstance(reason, TimeoutError)
            if isinstance(reason, ConnectionRefusedError) or broken == BROKEN_TRIES or time.monotonic() > deadline:
                raise ServerDied(f"{url} does not answer any more ({said})") from error
        except (http.client.HTTPException, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise _no_sglang(url, error) from error
        time.sleep(PAUSE_SECONDS)


def first(url: str) -> ServerInfo:
    """`read` outside a lease, where nobody would start a server again. Raises UserError."""
    try:
        return read(url)
    except ServerDied as error:
        raise UserError(f"{error}: start that server, or look into its log") from error


def _no_sglang(url: str, error: Exception) -> UserError:
    return UserError(f"{url}: does not say what it serves ({type(error).__name__}: {error}); is it SGLang?")


def _asked(url: str) -> ServerInfo:
    try:
        said = ask(url, "/server_info")
    except urllib.error.HTTPError as error:
        if error.code not in NOT_FOUND:
            raise
        said = ask(url, "/get_server_info")
    try:
        model = ask(url, "/model_info")
    except urllib.error.HTTPError as error:
        if error.code not in NOT_FOUND:
            raise
        model = ask(url, "/get_model_info")
    listed = ask(url, "/v1/models") if said.get("context_length") is None else {}
    return _info(said, model, listed)


def _info(said: dict[str, Any], model: dict[str, Any], listed: dict[str, Any]) -> ServerInfo:
    states = said.get("internal_states") or [{}]
    kv_tokens = int(said["max_total_num_tokens"])
    context = said.get("context_length") or listed["data"][0]["max_model_len"]
    chunk = said.get("chunked_prefill_size")
    running = said.get("max_running_requests") or states[0].get("effective_max_running_requests_per_dp")
    split = [name for name in ("attn_cp_size", "dcp_size") if (said.get(name) or 1) > 1]
    split += [name for name in ("enable_prefill_cp", "enable_two_batch_overlap", "enable_pdmux") if said.get(name)]
    if said.get("disaggregation_mode") not in (None, "null"):
        split.append("disaggregation_mode")
    return ServerInfo(
        version=str(said["version"]),
        model_path=str(model["model_path"]),
        context_length=int(context),
        kv_tokens=kv_tokens,
        chunk=int(chunk) if chunk and int(chunk) > 0 else None,
        tp=int(said.get("tp_size") or 1),
        dp=int(said.get("dp_size") or 1),
        dp_attention=bool(said.get("enable_dp_attention")),
        pp=int(said.get("pp_size") or 1),
        speculative=said.get("speculative_algorithm") or None,
        radix=not said.get("disable_radix_cache"),
        vocab_size=_vocab_size(Path(str(model["model_path"]))),
        dtype=str(said.get("dtype") or "auto"),
        max_running=int(running) if running else None,
        longest_input=int(said["max_req_input_len"]) if said.get("max_req_input_len") else None,
        splits=tuple("--" + name.replace("_", "-") for name in split),
    )


def _vocab_size(model: Path) -> int | None:
    try:
        config = json.loads((model / "config.json").read_text(encoding="utf-8"))
        return int((config.get("text_config") or config)["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def require_capturable(info: ServerInfo, longest: int, vocab_size: int) -> None:
    """Refuse a server whose captures would be wrong, incomplete or impossible.

    `longest`: tokens of the longest sample; `vocab_size`: the target's. Raises UserError.
    """
    where = f"SGLang {info.version} serving {info.model_path}"
    if info.speculative:
        raise UserError(f"{where}: speculative decoding ({info.speculative}) truncates captured states: {REMEDY}")
    if info.pp > 1:
        raise UserError(f"{where}: no process of a pipeline (pp {info.pp}) sees all layers: use tensor parallelism")
    if info.dp_attention:
        raise UserError(f"{where}: data-parallel attention mixes the rows of replicas: {REMEDY}")
    if info.dp > 1:
        raise UserError(
            f"{where}: {info.dp} replicas behind one address cannot be told apart: start each as a server of its own "
            "and name all of them in server.url"
        )
    if info.splits:
        raise UserError(f"{where}: {', '.join(info.splits)} divides a request's tokens between processes: {REMEDY}")
    if info.vocab_size is not None and info.vocab_size != vocab_size:
        raise UserError(
            f"{where}: has a vocabulary of {info.vocab_size} tokens, the target one of "
            f"{vocab_size}: it serves another model"
        )
    if longest + 1 > info.context_length:
        raise UserError(
            f"{where}: the longest sample has {longest} tokens, the context {info.context_length}: raise "
            "context-length in server.args, or shorten answers.max_new_tokens"
        )
    if longest + 1 > info.kv_tokens:
        raise UserError(
            f"{where}: the longest sample has {longest} tokens, the KV pool holds {info.kv_tokens}: raise "
            "mem-fraction-static or max-total-tokens in server.args"
        )
    if info.longest_input is not None and longest >= info.longest_input:
        raise UserError(
            f"{where}: the longest sample has {longest} tokens, prompts must stay below {info.longest_input}: raise "
            "context-length in server.args, or shorten answers.max_new_tokens"
        )
