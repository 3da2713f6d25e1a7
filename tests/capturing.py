"""A server that answers like SGLang with the capture plugin, in this process: a tiny transformers model behind HTTP.

`spoil(server, wanted, aux, last)` may change what is captured, to show that it is found out.
"""

import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import transformers

from eyas.engines.sglang.info import ServerInfo
from eyas.engines.sglang.plugin.protocol import FORMAT, Wanted, status_file
from eyas.engines.sglang.server import Endpoint
from eyas.engines.sglang.twinmodel import states

LAYERS = (2, 4, 5)
Spoil = Callable[["Capturing", Wanted, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def as_it_is(server: "Capturing", wanted: Wanted, aux: torch.Tensor, last: torch.Tensor) -> Any:
    """Spoils nothing."""
    return aux, last


class Capturing:
    """The server; use it as a context."""

    def __init__(self, model: Path, folder: Path, spoil: Spoil = as_it_is, tp: int = 1, chunk: int = 64) -> None:
        self.model = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self.root, self.status = folder / "root", folder / "status"
        self.spoil, self.tp, self.chunk = spoil, tp, chunk
        self.under_way = 0
        self.plain = 0
        self.seen: list[list[int]] = []
        self.rank = 0
        self._lock = threading.Lock()
        for path in (self.root, self.status):
            path.mkdir(parents=True)
        for rank in range(tp):
            self.say(rank)

    def say(self, rank: int, **other: Any) -> None:
        """Write a rank's status."""
        said = {"layers": list(LAYERS), "root": str(self.root), "problem": None, "hidden_size": 32, "dtype": "float32"}
        status_file(self.status, rank).write_text(json.dumps({**said, **other}))

    @property
    def info(self) -> ServerInfo:
        """What it would say of itself."""
        vocab = self.model.config.vocab_size
        return ServerInfo(
            "0.5.23", "tiny", 300, 4000, self.chunk, self.tp, 1, False, 1, None, True, vocab, "float32", 64
        )

    def __enter__(self) -> Endpoint:
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                content = json.dumps(outer.answer(body)).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *args: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 128

        self._server = Server(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})
        self._thread.start()
        self._torch_threads = torch.get_num_threads()
        torch.set_num_threads(1)
        return Endpoint(f"http://127.0.0.1:{self._server.server_port}", self.root, self.status)

    def __exit__(self, *_: object) -> None:
        torch.set_num_threads(self._torch_threads)
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        """One token, and a capture file if the request id asks for one."""
        ids, wanted = body["input_ids"], Wanted.of(body.get("rid", ""))
        self.under_way += 1
        with self._lock:
            time.sleep(0.002)
            all_states, logits = states(self.model, torch.tensor(ids))
            if wanted is None:
                self.plain += 1
            else:
                aux = torch.cat([all_states[layer] for layer in LAYERS], -1)
                for rank in range(self.tp if wanted.every_rank else 1):
                    self.rank = rank
                    self._write(wanted, ids, *self.spoil(self, wanted, aux.clone(), all_states[-1].clone()))
                self.seen.append(ids)
        self.under_way -= 1
        meta = {"cached_tokens": 0, "prompt_tokens": len(ids)}
        return {"output_ids": [int(logits[-1].argmax())], "meta_info": meta}

    def _write(self, wanted: Wanted, ids: list[int], aux: torch.Tensor, last: torch.Tensor) -> None:
        tensors = {"ids": torch.tensor(ids, dtype=torch.int32), "aux": aux.contiguous(), "last": last.contiguous()}
        metadata = {"format": FORMAT, "rid": wanted.rid, "layers": json.dumps(LAYERS)}
        partial = wanted.partial(self.root, self.rank)
        safetensors.torch.save_file(tensors, partial, metadata)
        partial.rename(wanted.file(self.root, self.rank))
