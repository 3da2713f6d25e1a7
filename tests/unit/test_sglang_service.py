"""The services: a launched server as the runner runs it, existing ones, and what is refused."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from eyas.engines import target as targets
from eyas.engines.sglang import info, install, kept, server, service
from eyas.engines.sglang.http import ServerDied
from eyas.errors import UserError
from eyas.files import read_json, write_json
from eyas.plan import code
from eyas.progress import Silent
from eyas.spec import StepSpec
from test_server_launch import Said, fake, gone, sleepers

SECTIONS = ("target", "server", "capture", "decode")


class EnoughError(Exception):
    """Raised out of `ready` to leave a service that serves for good."""


@pytest.fixture
def target(tmp_path: Path, tiny_llama: Path) -> Path:
    """Output of the target step; the fake server says that it serves such a model."""
    out = tmp_path / "target"
    out.mkdir()
    targets.run(StepSpec("target", 0, {"target": {"model": str(tiny_llama)}, "engine": {}}, {}), out, Silent())
    return out


def spec(target: Path, tmp: Path, mode: str = "", **how: Any) -> StepSpec:
    config = {name: how.pop(name, {}) for name in ("capture", "decode")}
    sections = {"target": {"model": "m"}, "server": fake(mode, tmp, **how).model_dump(mode="json"), **config}
    return StepSpec("sglang", 0, sections, {"target": target, "export": tmp / "draft"})


def said_ready(entry: Callable[..., None], made: StepSpec, out: Path, progress: Any = None) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def ready(content: dict[str, Any]) -> None:
        found.update(json.loads(json.dumps(content)))
        raise EnoughError

    with contextlib.suppress(EnoughError):
        entry(made, out, progress or Silent(), ready)
    return found


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def test_ready_of_a_launched_server(target: Path, tmp_path: Path) -> None:
    told = Said()
    ready = said_ready(service.serve, spec(target, tmp_path), tmp_path, told)
    (endpoint,) = server.endpoints(ready)
    assert endpoint.root is not None
    assert (tmp_path / "server" / "status").samefile(endpoint.status or "")
    assert info.ServerInfo(**{**ready["info"], "splits": tuple(ready["info"]["splits"])}).kv_tokens == 20000
    assert ready["seconds"]["weights"] == 1.36
    assert ready["info"]["chunk"] is None
    assert any("the KV pool holds 20,000 tokens, less than the context length 32,768" in one for one in told.milestones)
    assert json.loads((tmp_path / "server" / "orders.json").read_text())["layers"] is None
    ready = said_ready(service.serve, spec(target, tmp_path, capture={"layers": [1, 2, 6]}), tmp_path)
    assert json.loads((tmp_path / "server" / "orders.json").read_text())["layers"] == [1, 2, 6]
    assert ready["servers"]


def test_ready_of_a_server_with_the_draft(target: Path, tmp_path: Path) -> None:
    ready = said_ready(service.serve_drafted, spec(target, tmp_path, decode={"draft_tokens": 4}), tmp_path)
    assert server.endpoints(ready)[0].root is None
    assert ready["info"]["speculative"] == "EAGLE3"


def started_service(target: Path, tmp_path: Path) -> tuple[subprocess.Popen[bytes], Path]:
    """The service in a process of its own, as the runner starts it."""
    folder, entry = tmp_path / "service", "eyas.engines.sglang.service:serve"
    folder.mkdir()
    made = spec(target, tmp_path)
    inputs = {name: str(path) for name, path in made.inputs.items()}
    content = {"step": "sglang", "entry": entry, "digest": "d", "code": code.digest(entry), "seed": 0}
    write_json(folder / "spec.json", {**content, "config": made.config, "inputs": inputs})
    command = [sys.executable, "-m", "eyas.step", "sglang", "--spec", str(folder / "spec.json")]
    with (folder / "log.txt").open("wb") as log:
        popen = subprocess.Popen(
            [*command, "--out", str(folder), "--service"], start_new_session=True, stdout=log, stderr=log
        )
    deadline = time.monotonic() + 60
    while not (folder / "ready.json").exists():
        assert popen.poll() is None, (folder / "log.txt").read_text()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return popen, folder


@pytest.mark.parametrize("how", ["end", "kill", "die"])
def test_nothing_is_left_of_a_service(target: Path, tmp_path: Path, how: str) -> None:
    popen, folder = started_service(target, tmp_path)
    worked = folder / "partial" / "server"
    (endpoint,) = server.endpoints(read_json(folder / "ready.json"))
    assert kept.marked(kept.mark_of(worked))
    if how == "end":
        begun = time.monotonic()
        os.killpg(popen.pid, signal.SIGTERM)
        assert popen.wait(10) == 128 + signal.SIGTERM
        # The runner waits for five seconds before it kills.
        assert time.monotonic() - begun < 5
        assert not kept.marked(kept.mark_of(worked))
        assert not sleepers()
    elif how == "kill":
        os.killpg(popen.pid, signal.SIGKILL)
        popen.wait(10)
    else:
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"{endpoint.url}/die", timeout=5)
        # Neither finished nor a user's error: the runner starts it again.
        assert popen.wait(20) == 1
        assert read_json(folder / "exit.json")["error"].startswith(
            "RuntimeError: the server died: RuntimeError: lost it; "
        )
    assert gone(worked)
    deadline = time.monotonic() + 10
    while (endpoint.root or tmp_path).exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def existing(tmp_path: Path, tiny: Path, mode: str = "", **how: Any) -> Any:
    """A server that is there already, with the plugin that `eyas plugin` installs."""
    install.install(tmp_path / "plug", "default", "hidden_states", None)
    config = fake(mode, tmp_path, **how)
    env = {**config.env, "EYAS_CAPTURE": str(tmp_path / "plug" / "orders.json")}
    config = config.model_copy(update={"env": env})
    return server.started(config, tiny, "auto", tmp_path / "other", Silent(), capture=False)


def test_existing_servers(target: Path, tmp_path: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "WATCH_SECONDS", 0.05)
    monkeypatch.setattr("eyas.engines.sglang.command.VARIABLE", "NOT_REMOVED")
    root = str(tmp_path / "plug" / "captures")
    with existing(tmp_path, tiny_llama) as running:
        made = spec(target, tmp_path, url=running.endpoint.url + "/", captures=root)
        made.config["server"]["captures"] = root
        ready = said_ready(service.serve, made, tmp_path)
        assert server.endpoints(ready) == [server.Endpoint(running.endpoint.url, Path(root), Path(root) / "status")]
        made.config["capture"] = {"layers": [1, 2, 3]}
        with pytest.raises(UserError, match=r"takes hidden_states \[2, 4, 5\], capture.layers means \[1, 2, 3\]"):
            said_ready(service.serve, made, tmp_path)
        made.config["capture"] = {}
        status = Path(root) / "status" / "rank0.json"
        right = status.read_text()
        for old, new, text in (
            ('"problem": null', '"problem": "no"', "the capture plugin cannot capture: no"),
            ('"hidden_size": 32', '"hidden_size": 33', "serves a model with hidden_size 33, the target has 32"),
            (right, "", "rank 0 has not loaded the capture plugin"),
        ):
            status.write_text(right.replace(old, new))
            with pytest.raises(UserError, match=text):
                said_ready(service.serve, made, tmp_path)
        status.write_text(right)
        with pytest.raises(RuntimeError, match="has gone"):
            service.serve(made, tmp_path, Silent(), lambda _: os.kill(running.pid, signal.SIGKILL))
    with pytest.raises(UserError, match="nothing listens at"):
        said_ready(service.serve, made, tmp_path)


def test_existing_servers_need_their_roots(tmp_path: Path) -> None:
    for url, captures, text in (
        ("http://a", None, "names 0 capture roots for 1 servers in server.url; `eyas plugin DIR` makes one"),
        (["http://a", "http://b"], str(tmp_path), "names 1 capture roots for 2 servers"),
        (["http://a", "http://b"], [str(tmp_path), str(tmp_path / ".")], "cannot write into one capture root"),
        ("a:30000", str(tmp_path), "'a:30000' is no address of a server; write http://host:port"),
        ("http://a:99999", str(tmp_path), "'http://a:99999' is no address of a server"),
        ("http://a", str(tmp_path / "none"), "is no folder on this machine"),
    ):
        config = fake(tmp=tmp_path).model_copy(update={"url": url, "captures": captures})
        with pytest.raises(UserError) as error:
            service.existing(config)
        assert text in str(error.value)


INFO = info.ServerInfo("1", "/m", 1000, 500, None, 1, 1, False, 1, None, True, 50, "auto", 64, 994)


@pytest.mark.parametrize(
    ("changes", "longest", "text"),
    [
        ({"speculative": "EAGLE3"}, 0, "speculative decoding (EAGLE3) truncates captured states"),
        ({"pp": 2}, 0, "no process of a pipeline (pp 2) sees all layers"),
        ({"dp_attention": True}, 0, "data-parallel attention mixes"),
        ({"splits": ("--enable-prefill-cp",)}, 0, "--enable-prefill-cp divides a request's tokens"),
        ({"vocab_size": 51}, 0, "a vocabulary of 51 tokens, the target one of 50"),
        ({}, 500, "the longest sample has 500 tokens, the KV pool holds 500: raise mem-fraction-static"),
        ({"kv_tokens": 5000}, 1000, "the longest sample has 1000 tokens, the context 1000: raise context-length"),
        ({"kv_tokens": 5000}, 994, "prompts must stay below 994"),
    ],
)
def test_servers_that_cannot_be_captured_from(changes: dict[str, Any], longest: int, text: str) -> None:
    info.require_capturable(INFO, 499, 50)
    with pytest.raises(UserError) as error:
        info.require_capturable(info.ServerInfo(**{**INFO.__dict__, **changes}), longest, 50)
    assert text in str(error.value)
    assert "\n" not in str(error.value)


def test_what_is_no_server(tmp_path: Path) -> None:
    with pytest.raises(ServerDied, match=r"http://127.0.0.1:1 does not answer any more"):
        info.read("http://127.0.0.1:1")
    with pytest.raises(UserError, match=r"http://127.0.0.1:1 does not answer any more .*: start that server"):
        info.first("http://127.0.0.1:1")
    with pytest.raises(UserError, match=r"http://no.host.invalid:1: this host is not known here"):
        info.read("http://no.host.invalid:1")


@contextlib.contextmanager
def web(answer: Callable[[BaseHTTPRequestHandler], None]) -> Iterator[str]:
    handler = type("Handler", (BaseHTTPRequestHandler,), {"do_GET": answer, "log_message": lambda *_: None})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as one:
        threading.Thread(target=one.serve_forever, args=(0.05,), daemon=True).start()
        yield f"http://127.0.0.1:{one.server_port}"
        one.shutdown()


def test_plain_web_servers_and_busy_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(info, "PAUSE_SECONDS", 0.01)

    def html(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        handler.wfile.write(b"<html>")

    tries = []

    def busy(handler: BaseHTTPRequestHandler) -> None:
        tries.append(handler.path)
        said = {"version": "1", "max_total_num_tokens": 9, "context_length": 9, "model_path": "/m"}
        handler.send_response(200 if len(tries) > 2 else 503)
        handler.end_headers()
        handler.wfile.write(json.dumps(said).encode())

    for answer in (html, lambda handler: handler.send_error(404), lambda handler: handler.send_error(501)):
        with web(answer) as url, pytest.raises(UserError, match="is it SGLang"):
            info.read(url)
    with web(busy) as url:
        assert info.read(url).kv_tokens == 9
    with web(lambda handler: handler.connection.close()) as url, pytest.raises(ServerDied):
        info.read(url)


def test_eyas_plugin(tmp_path: Path) -> None:
    said = install.install(tmp_path / "it's", "1,14,26", "layer_output", None)
    assert f"export EYAS_CAPTURE='{tmp_path}/it'\"'\"'s/orders.json'" in said
    assert "capture: {layers: [1,14,26], convention: layer_output}" in said
    orders = json.loads((tmp_path / "it's" / "orders.json").read_text())
    assert orders["layers"] == [2, 15, 27]
    assert Path(orders["status"]).is_dir()
    install.install(tmp_path / "it's", "default", "hidden_states", tmp_path / "root")
    assert json.loads((tmp_path / "it's" / "orders.json").read_text())["root"] == str(tmp_path / "root")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").touch()
    for folder, layers, text in (
        ("mine", "default", "holds something else"),
        ("new", "1,2", "EAGLE-3 takes three different layers"),
        ("new", "a", "write default, or three numbers"),
        ("new", "3,2,1", "ascending order"),
    ):
        with pytest.raises(UserError, match=text):
            install.install(tmp_path / folder, layers, "hidden_states", None)
