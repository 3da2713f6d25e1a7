"""An SGLang server with the capture plugin, played by a thread: a real (tiny) model behind the same HTTP and files.

`fault(wanted, tensors, server)` may change what is written, return None for "no file", or a string for `.failed`;
`reply(meta, body)` may change a reply's meta_info. `statuses` are HTTP codes to answer next instead of working.
"""

import json
import socket
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from eyas.engines import target as targets
from eyas.engines.inprocess.generate import answer
from eyas.engines.inprocess.target import InProcessTarget
from eyas.engines.sglang.plugin.protocol import FORMAT, Wanted, status_file
from eyas.engines.sglang.server import Endpoint
from eyas.progress import Silent

LAYERS = (2, 4, 5)


class FakeServer:
    """Serves until `close`."""

    def __init__(self, model: Path, folder: Path, layers: tuple[int, int, int] = LAYERS) -> None:
        self.info = targets.inspect(str(model), Silent())
        self.target = InProcessTarget(self.info, layers, torch.float32, torch.device("cpu"))
        self.model, self.layers, self.tp = model, layers, 1
        self.root, self.status = folder / "root", folder / "status"
        for path in (self.root, self.status):
            path.mkdir(parents=True)
        self.fault: Callable[[Wanted, dict[str, torch.Tensor], FakeServer], Any] = lambda w, t, s: t
        self.reply: Callable[[dict[str, Any], dict[str, Any]], None] = lambda meta, body: None
        self.statuses: list[int] = []
        self.facts: dict[str, Any] = {}
        self.seen: list[dict[str, Any]] = []
        self.under_way = self.most = 0
        self.lock, self.model_lock = threading.Lock(), threading.Lock()
        self.draft_tokens = 0
        self.dies_after: int | None = None
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        self.say()

    def say(self, **changed: Any) -> None:
        """Write the ranks' status files."""
        for rank in range(self.tp):
            said = {
                "layers": list(self.layers),
                "num_layers": self.info.num_layers,
                "hidden_size": self.info.hidden_size,
                "vocab_size": self.info.vocab_size,
                "dtype": "float32",
                "problem": None,
                **changed,
            }
            status_file(self.status, rank).write_text(json.dumps(said))

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(self.url, self.root, self.status)

    @property
    def ready(self) -> dict[str, Any]:
        """What the service's ready.json holds."""
        return {"servers": [self.endpoint.to_json()], "info": {}, "seconds": {}}

    def close(self) -> None:
        if self.http.socket.fileno() < 0:
            return  # it has died
        self.http.shutdown()
        self.http.server_close()

    def states(self, ids: list[int]) -> dict[str, torch.Tensor]:
        """What the plugin would write."""
        with self.model_lock:
            out = self.target.run(torch.tensor([ids]), self.target.cache(1, len(ids)))
        return {"ids": torch.tensor(ids, dtype=torch.int32), "aux": out.aux[0].clone(), "last": out.last[0].clone()}

    def capture(self, wanted: Wanted, ids: list[int]) -> int:
        tensors = self.states(ids)
        token = int(self.target.greedy(tensors["last"][-1]))
        for rank in range(self.tp if wanted.every_rank else 1):
            self.rank = rank
            made = self.fault(wanted, {name: t.clone() for name, t in tensors.items()}, self)
            if isinstance(made, str):
                wanted.failed(self.root).write_text(made)
            elif made is not None:
                write(wanted.file(self.root, rank), made, wanted.rid, self.layers)
        return token

    def speculate(self, ids: list[int]) -> tuple[list[int], list[int]]:
        """Verify steps for an answer of these ids, as SGLang counts: histogram, tokens after each step."""
        histogram, said, place = [0] * (self.draft_tokens + 1), [1], 1
        while place < len(ids):
            accepted = ids[place] % (self.draft_tokens + 1)
            histogram[accepted] += 1
            place = min(len(ids), place + accepted + 1)
            said.append(place)
        return histogram, said


def write(path: Path, tensors: dict[str, torch.Tensor], rid: str, layers: tuple[int, ...]) -> None:
    """Write a capture file as the plugin does."""
    partial = path.with_name(f".{path.name.removesuffix('.safetensors')}.partial")
    metadata = {"format": FORMAT, "rid": rid, "layers": json.dumps(layers)}
    safetensors.torch.save_file({name: t.contiguous() for name, t in tensors.items()}, partial, metadata)
    partial.rename(path)


def _handler(server: FakeServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: Any) -> None:
            pass

        def do_GET(self) -> None:
            if self.path == "/server_info":
                said = {
                    "version": "0.5.fake",
                    "max_total_num_tokens": 4000,
                    "context_length": 512,
                    "chunked_prefill_size": 128,
                    "tp_size": server.tp,
                    "dtype": "float32",
                    **server.facts,
                }
            else:
                said = {"model_path": str(server.model)}
            self.answer(200, said)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with server.lock:
                server.seen.append(body)
                server.under_way += 1
                server.most = max(server.most, server.under_way)
                status = server.statuses.pop(0) if server.statuses else 200
                if server.dies_after is not None and len(server.seen) > server.dies_after:
                    status = 0
            try:
                if status == 0:
                    server.http.socket.close()
                    self.close_connection = True
                    self.connection.shutdown(socket.SHUT_RDWR)
                elif status != 200:
                    self.answer(status, {"error": {"message": f"told to say {status}"}})
                else:
                    self.generate(body)
            finally:
                with server.lock:
                    server.under_way -= 1

        def generate(self, body: dict[str, Any]) -> None:
            ids = body["input_ids"]
            assert all(0 <= token < server.info.vocab_size for token in ids), "the whole server would be dead"
            wanted = Wanted.of(body.get("rid", ""))
            longest = body["sampling_params"]["max_new_tokens"]
            meta: dict[str, Any] = {"prompt_tokens": len(ids), "cached_tokens": 0}
            if wanted is not None:
                said = [server.capture(wanted, ids)]
            else:
                with server.model_lock:
                    said = answer(server.target, [ids], longest)[0].ids[len(ids) :]
            if body.get("return_logprob"):
                states = server.states(ids)["last"]
                logprobs = (states @ server.target.head.T).log_softmax(-1)
                rows = [[float(logprobs[i, token]), token, None] for i, token in enumerate(ids[1:])]
                meta["input_token_logprobs"] = [[None, ids[0], None], *rows]
            ended = said[-1] in server.info.eos_token_ids
            meta["finish_reason"] = {"type": "stop", "matched": said[-1]} if ended else {"type": "length"}
            meta["completion_tokens"] = len(said)
            steps = [len(said)]
            if server.draft_tokens and len(said) > 1:
                meta["spec_correct_drafts_histogram"], steps = server.speculate(said)
                meta["spec_verify_ct"] = sum(meta["spec_correct_drafts_histogram"])
            server.reply(meta, body)
            if body.get("stream"):
                events = [{"output_ids": said[:n], "meta_info": {**meta, "completion_tokens": n}} for n in steps]
                self.events(events)
            else:
                self.answer(200, {"output_ids": said, "meta_info": meta})

        def answer(self, status: int, said: Any) -> None:
            content = json.dumps(said).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def events(self, events: list[dict[str, Any]]) -> None:
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for data in [*map(json.dumps, events), "[DONE]"]:
                part = f"data: {data}\n\n".encode()
                self.wfile.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
            self.wfile.write(b"0\r\n\r\n")

    return Handler
