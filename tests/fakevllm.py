"""A vLLM server, played by a thread: fixed answers, and counts of drafts as its /metrics give them."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

COUNTS = """# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{{engine="0"}} {drafts}.0
vllm:spec_decode_num_accepted_tokens_total{{engine="0"}} {accepted}.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="0"}} {first}.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="1"}} {second}.0
"""


class FakeVLLM:
    """Answers every prompt with `said`; with `drafting`, two drafts a step, of which one is accepted."""

    def __init__(self, model: Path, said: list[int], drafting: bool = False) -> None:
        self.model, self.said, self.drafting = model, said, drafting
        self.drafts = self.stray = 0
        self.seen: list[dict[str, Any]] = []
        self.lock = threading.Lock()
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def close(self) -> None:
        self.http.shutdown()
        self.http.server_close()

    def metrics(self) -> str:
        n = self.drafts + self.stray
        return COUNTS.format(drafts=n, accepted=n, first=n, second=0) if self.drafting else "# nothing\n"

    def steps(self) -> list[list[int]]:
        """The answer in pieces: two tokens a step where drafts are accepted, else one."""
        size = 2 if self.drafting else 1
        return [self.said[:1], *(self.said[i : i + size] for i in range(1, len(self.said), size))]


def _handler(server: FakeVLLM) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: Any) -> None:
            pass

        def do_GET(self) -> None:
            model = {"id": "served", "owned_by": "vllm", "root": str(server.model), "max_model_len": 512}
            pages = {"/v1/models": {"data": [model]}, "/version": {"version": "0.25.fake"}}
            if self.path == "/metrics":
                self.answer(200, server.metrics().encode())
            elif self.path in pages:
                self.answer(200, json.dumps(pages[self.path]).encode())
            else:
                self.answer(404, b"{}")

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with server.lock:
                server.seen.append(body)
            if "prompt_logprobs" in body:
                rows = [None, *({str(token): {"logprob": -1.5}} for token in body["prompt"][1:])]
                self.answer(200, json.dumps({"choices": [{"prompt_logprobs": rows}]}).encode())
                return
            pieces = server.steps()
            with server.lock:
                server.drafts += len(pieces) - 1
            events: list[dict[str, Any]] = [{"choices": [{"token_ids": piece}]} for piece in pieces]
            events.append({"choices": [], "usage": {"completion_tokens": len(server.said)}})
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for data in [*map(json.dumps, events), "[DONE]"]:
                part = f"data: {data}\n\n".encode()
                self.wfile.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
            self.wfile.write(b"0\r\n\r\n")

        def answer(self, status: int, content: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    return Handler
