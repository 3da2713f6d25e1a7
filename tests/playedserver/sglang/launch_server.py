"""`python -m sglang.launch_server`: a real (tiny) model behind SGLang's flags, HTTP and the plugin's files."""

import argparse
import json
import os
import shutil
import sys
import tempfile
from http.server import ThreadingHTTPServer
from pathlib import Path

# The shipped plugin is an eyas with a few modules; here the whole one is needed.
sys.path[:] = [path for path in sys.path if Path(path).name != "plugin"]

import tiny  # noqa: E402
from fakesglang import LAYERS, FakeServer  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("model-path", "host", "speculative-algorithm"):
        parser.add_argument(f"--{name}", default=None)
    for name in ("port", "tp", "speculative-num-steps"):
        parser.add_argument(f"--{name}", type=int, default=0)
    asked, _ = parser.parse_known_args()
    folder = Path(tempfile.mkdtemp(prefix="played-"))
    orders = json.loads(Path(os.environ["EYAS_CAPTURE"]).read_text()) if "EYAS_CAPTURE" in os.environ else None
    model = Path(shutil.copytree(asked.model_path, folder / "model"))
    if not (model / "tokenizer.json").exists():  # a twin has none
        tiny.write_tokenizer(model)
    server = FakeServer(model, folder, tuple((orders or {}).get("layers") or LAYERS))
    server.tp, server.draft_tokens = max(1, asked.tp), asked.speculative_num_steps
    server.facts = {"speculative_algorithm": asked.speculative_algorithm}
    if orders:
        server.root, server.status = Path(orders["root"]), Path(orders["status"])
        server.say(root=orders["root"], model="LlamaForCausalLM", device="cpu", pid=os.getpid())
    handler = server.http.RequestHandlerClass
    ThreadingHTTPServer((asked.host or "127.0.0.1", asked.port), handler).serve_forever()


if __name__ == "__main__":
    main()
