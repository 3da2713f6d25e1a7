"""Entries of toy steps and of a toy service. Small, since its imports are digested by every toy step."""

import os
import signal
import threading
import time
import urllib.request
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

from eyas.errors import UserError
from eyas.files import write_atomic
from eyas.progress import Progress
from eyas.spec import StepSpec


def work(spec: StepSpec, out: Path, progress: Progress) -> dict[str, Any]:
    """Make `pieces` files, then do what the options say."""
    options = spec.config.get(spec.step, {})
    pieces = options.get("pieces", 1)
    there = len(list(out.glob("piece*")))
    progress.total(pieces, "pieces", done=there)
    progress.milestone(f"begins at piece {there}")
    progress.milestone("works")
    for number in range(there, pieces):
        time.sleep(options.get("sleep", 0))
        write_atomic(out / f"piece{number}", f"{spec.step} {number}\n" * options.get("lines", 1))
        progress.advance(1)
    if options.get("wait_for"):
        while not Path(options["wait_for"]).exists():
            time.sleep(0.02)
    if options.get("fork") and os.fork() == 0:
        time.sleep(60)
    if options.get("refuse"):
        raise UserError("sample 3 of prompts.txt\nis empty")
    if options.get("crash"):
        raise ZeroDivisionError("a real fault")
    if options.get("memory"):
        raise RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: 4 bytes")
    if options.get("extra"):
        raise ModuleNotFoundError("No module named 'torch.nn'", name="torch.nn")
    if options.get("kill"):
        os.kill(os.getpid(), signal.SIGKILL)
    if "exit" in options:
        raise SystemExit(options["exit"])
    progress.metric(loss=float("nan"), step=1)
    return {"pieces": pieces, "inputs": sorted(spec.inputs), "versions": {"toy": "1"}}


def serve(spec: StepSpec, out: Path, progress: Progress, ready: Callable[[dict[str, Any]], None]) -> None:
    """A service; GET /die ends it at once."""
    if spec.config["service"].get("refuse"):
        raise UserError("port taken")
    if spec.config["service"].get("crash"):
        raise ZeroDivisionError("no server today")

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/die":
                os._exit(3)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"hello")

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Timer(0.1, ready, [{"url": f"http://127.0.0.1:{server.server_port}", "pid": os.getpid()}]).start()
    server.serve_forever()


def ask(spec: StepSpec, out: Path, progress: Progress) -> dict[str, Any]:
    """Ask the service; with `die` kill it first, as often as told."""
    url, tries = spec.services["web"]["url"], len(list(out.glob("died*")))
    try:
        if tries < spec.config[spec.step].get("die", 0):
            write_atomic(out / f"died{tries}", "")
            urllib.request.urlopen(f"{url}/die", timeout=5).close()
        with urllib.request.urlopen(url, timeout=5) as answer:
            return {"answer": answer.read().decode(), "pid": spec.services["web"]["pid"], "died": tries}
    except OSError:
        raise SystemExit(75) from None
