"""A server that does what FAKE says: nothing special, or one of the things that go wrong."""

import argparse
import json
import os
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

LINES = """\
[2026-11-30 19:06:13] Load weight begin. avail mem=21.48 GB
\rMulti-thread loading shards:   0% Completed | 0/2 [00:00<?, ?it/s]\rMulti-thread loading shards:  50% \
Completed | 1/2 [00:00<00:00,  1.08it/s]
[2026-11-30 19:06:15] Load weight end. elapsed=1.36 s, type=LlamaForCausalLM, avail mem=20.99 GB, mem usage=0.49 GB.
[2026-11-30 19:06:18] KV Cache is allocated. dtype: torch.float32, #tokens: 20000, K size: 0.43 GB, V size: 0.43 GB
[2026-11-30 19:06:18] max_total_num_tokens=20000, chunked_prefill_size=4096, context_len=8192, available_cpu_mem=20 GB
"""
SCHEDULER = """\
[2026-11-30 19:06:18 TP0] Scheduler hit an exception: Traceback (most recent call last):
  File "scheduler.py", line 3, in run
    raise {0}
{0}

[2026-11-30 19:06:19] SIGQUIT received. signum=None, frame=None. It usually means one child failed.
Traceback (most recent call last):
  File "launch_server.py", line 9, in <module>
RuntimeError: Rank 0 scheduler died during initialization (exit code: 1)
"""
CHILD = "import time; time.sleep(600)"
GRANDCHILD = f"import os, subprocess, sys; subprocess.Popen([sys.executable, '-c', {CHILD!r}], start_new_session=True)"


def main() -> None:
    parser = argparse.ArgumentParser("launch_server.py")
    for name in ("model-path", "host", "dtype", "speculative-algorithm", "device", "mem-fraction-static"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--port", type=int)
    parser.add_argument("--tp", type=int)
    parser.add_argument("--trust-remote-code", action="store_true")
    asked, rest = parser.parse_known_args()
    if "--foo" in rest:
        parser.error("unrecognized arguments: --foo")
    fake = os.environ.get("FAKE", "")
    Path("argv.json").write_text(json.dumps(sys.argv[1:])) if fake == "argv" else None
    print(LINES, end="", flush=True)
    # One in the same group, one in a session of its own, one whose parent is gone and whose environment is empty.
    subprocess.Popen([sys.executable, "-c", CHILD])
    subprocess.Popen([sys.executable, "-c", CHILD], start_new_session=True)
    subprocess.run([sys.executable, "-c", GRANDCHILD], env=None if fake == "keep environment" else {})
    if fake == "out of memory":
        print(SCHEDULER.format("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."), flush=True)
        sys.exit(1)
    if fake == "fault":
        print(SCHEDULER.format("ValueError: no such kernel"), flush=True)
        sys.exit(1)
    if fake == "port taken" and not Path("taken").exists():
        Path("taken").touch()
        print(SCHEDULER.format("OSError: [Errno 98] Address already in use"), flush=True)
        sys.exit(1)
    if fake == "kill":
        os.kill(os.getpid(), 9)
    if fake == "silent":
        time.sleep(600)
    if (orders := os.environ.get("EYAS_CAPTURE")) and fake != "no plugin":
        data = json.loads(Path(orders).read_text())
        said = {
            "problem": "layers cannot be told" if fake == "problem" else None,
            "layers": data["layers"] or [2, 4, 5],
        }
        said |= {"num_layers": 8, "hidden_size": 32, "vocab_size": 259, "pid": os.getpid()}
        for rank in range(asked.tp):
            (Path(data["status"]) / f"rank{rank}.json").write_text(json.dumps(said))
    serve(asked, fake)


def serve(asked: argparse.Namespace, fake: str) -> None:
    info = {
        "version": "0.0", "dtype": "auto", "context_length": None, "max_total_num_tokens": 20000, "tp_size": asked.tp,
        "dp_size": 1, "pp_size": 1, "chunked_prefill_size": -1, "speculative_algorithm": asked.speculative_algorithm,
        "disable_radix_cache": False, "max_running_requests": None, "max_req_input_len": 8186,
        "internal_states": [{"effective_max_running_requests_per_dp": 64}],
    }  # fmt: skip
    refusals = 2

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answers = {
                "/server_info": info,
                "/model_info": {"model_path": asked.model_path},
                "/v1/models": {"data": [{"max_model_len": 32768}]},
                "/health": {},
            }
            if self.path == "/die":
                print(SCHEDULER.format("RuntimeError: lost it"), flush=True)
                os._exit(3)
            self.reply(200 if self.path in answers else 404, answers.get(self.path, {}))

        def do_POST(self) -> None:
            nonlocal refusals
            self.rfile.read(int(self.headers["Content-Length"]))
            if fake == "never ready":
                self.reply(503, {})
            elif refusals:
                refusals -= 1
                self.reply(503, {})
            else:
                self.reply(200, {"output_ids": [7]})

        def reply(self, code: int, content: object) -> None:
            print(f'[2026-11-30 19:06:19] INFO:     127.0.0.1:39080 - "{self.command} {self.path} HTTP/1.1" {code}')
            sys.stdout.flush()
            self.send_response(code)
            self.end_headers()
            self.wfile.write(json.dumps(content).encode())

        def log_message(self, *_: object) -> None: ...

    ThreadingHTTPServer((asked.host, asked.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
