"""`python -m sglang.launch_server`: answers of made-up tokens, whose speed its flags and environment decide.

TUNED, a JSON object, says what each setting does: `{"enable-mixed-chunk": 0.5}` halves the time of a token, "crash"
ends the server at its start, "die" at the tenth request, "hang" lets it never answer, "stall" not from the tenth on.
"""

import argparse
import json
import os
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN_SECONDS = 0.004
FLAGS = {
    "device": str,
    "disable-custom-all-reduce": bool,
    "disable-overlap-schedule": bool,
    "enable-mixed-chunk": bool,
    "num-continuous-decode-steps": int,
}


def main() -> None:
    parser = argparse.ArgumentParser("launch_server.py")
    for name in ("model-path", "host", "dtype"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--port", type=int)
    parser.add_argument("--tp", type=int)
    for name, kind in FLAGS.items():
        parser.add_argument(f"--{name}", **({"action": "store_true"} if kind is bool else {"type": kind}))
    asked, _ = parser.parse_known_args()
    # Read as SGLang's own code would read them: asked.disable_overlap_schedule, asked.enable_mixed_chunk,
    # asked.num_continuous_decode_steps, asked.disable_custom_all_reduce.
    rules = json.loads(os.environ.get("TUNED", "{}"))
    on = [name for name in FLAGS if getattr(asked, name.replace("-", "_"))]
    on += [f"{name}={value}" for name, value in os.environ.items()]
    done = [rules[name] for name in on if name in rules]
    if "crash" in done:
        print("Traceback (most recent call last):\nValueError: no such kernel", flush=True)
        sys.exit(1)
    if "hang" in done:
        time.sleep(600)
    seconds = TOKEN_SECONDS
    for factor in done:
        seconds *= factor if isinstance(factor, float) else 1.0
    serve(asked, seconds, done)


def serve(asked: argparse.Namespace, seconds: float, done: list[Any]) -> None:
    count, lock = 0, threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_GET(self) -> None:
            self.reply({"disable_overlap_schedule": False, "token_seconds": seconds})

        def do_POST(self) -> None:
            nonlocal count
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                count += 1
                if "die" in done and count == 10:
                    print("Traceback (most recent call last):\nRuntimeError: lost it", flush=True)
                    os._exit(3)
                stalled = "stall" in done and count >= 10
            if stalled:
                time.sleep(600)
            length = body["sampling_params"]["max_new_tokens"]
            if not body.get("stream"):
                self.reply({"output_ids": [7] * length})
                return
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for n in range(1, length + 1):
                time.sleep(seconds)
                meta = {"finish_reason": {"type": "length"}, "completion_tokens": n, "prompt_tokens": 3}
                self.part(json.dumps({"output_ids": [7] * n, "meta_info": meta}))
            self.part("[DONE]")
            self.wfile.write(b"0\r\n\r\n")

        def part(self, data: str) -> None:
            content = f"data: {data}\n\n".encode()
            self.wfile.write(f"{len(content):x}\r\n".encode() + content + b"\r\n")

        def reply(self, said: Any) -> None:
            content = json.dumps(said).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None: ...

    ThreadingHTTPServer((asked.host, asked.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
