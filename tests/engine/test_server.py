"""Real servers, started, asked and ended by the services."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch
from torch import nn

from eyas.config import Server
from eyas.draft import checkpoint
from eyas.draft.config import DraftConfig
from eyas.draft.model import DraftModel
from eyas.engines import target as targets
from eyas.engines import weights
from eyas.engines.sglang import info, keeper, server
from eyas.errors import UserError
from eyas.files import read_json, write_json
from eyas.plan import code
from eyas.progress import Silent
from eyas.run.protocol import Follower
from eyas.spec import StepSpec

pytestmark = pytest.mark.long


@pytest.fixture
def inputs(tmp_path: Path, smollm2: Path) -> dict[str, str]:
    """Outputs of the target step and of an export that nobody trained."""
    target, export = tmp_path / "target", tmp_path / "export"
    target.mkdir()
    export.mkdir()
    sections = {"target": {"model": str(smollm2)}, "engine": {"kind": "sglang"}}
    targets.run(StepSpec("target", 0, sections, {}), target, Silent())
    table = weights.embedding(smollm2).float()
    shape = DraftConfig.from_target(targets.read(target).config, 2048)
    draft = DraftModel(shape, nn.Embedding.from_pretrained(table))
    draft.set_vocabulary(torch.arange(2048))
    checkpoint.save(export, draft, torch.float32)
    return {"target": str(target), "export": str(export)}


def started(name: str, inputs: dict[str, str], folder: Path, python: str) -> tuple[subprocess.Popen[bytes], Any]:
    """A service as the runner starts it, and its ready.json."""
    entry = f"eyas.engines.sglang.service:{name}"
    config = {
        "target": {"model": "m", "dtype": "float32"},
        "server": {"python": python, "args": {"device": "cpu"}, "staging_mib": 64},
        "capture": {},
        "decode": {},
    }
    folder.mkdir()
    content = {"step": "sglang", "entry": entry, "digest": "d", "code": code.digest(entry), "seed": 0}
    write_json(folder / "spec.json", {**content, "config": config, "inputs": inputs})
    command = [sys.executable, "-m", "eyas.step", "sglang", "--spec", str(folder / "spec.json"), "--out", str(folder)]
    with (folder / "log.txt").open("wb") as log:
        popen = subprocess.Popen([*command, "--service"], start_new_session=True, stdout=log, stderr=log)
    while not (folder / "ready.json").exists():
        assert popen.poll() is None, (folder / "log.txt").read_text()
        time.sleep(0.2)
    return popen, read_json(folder / "ready.json")


def living(pids: list[int]) -> list[int]:
    found = []
    for pid in pids:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        found += [pid] if state not in "ZX" else []
    return found


def listens(url: str) -> bool:
    try:
        socket.create_connection(("127.0.0.1", urlsplit(url).port or 0)).close()
    except ConnectionRefusedError:
        return False
    return True


def test_a_killed_service_takes_its_server_along(inputs: dict[str, str], tmp_path: Path, sglang_python: str) -> None:
    popen, ready = started("serve", inputs, tmp_path / "service", sglang_python)
    (endpoint,) = server.endpoints(ready)
    pids = keeper.descendants(popen.pid)
    assert len(pids) >= 4
    found = info.read(endpoint.url)
    assert (found.context_length, found.kv_tokens, found.vocab_size, found.longest_input) == (8192, 20000, 49152, 8186)
    assert (found.speculative, found.tp, found.pp, found.dtype, found.radix) == (None, 1, 1, "float32", True)
    info.require_capturable(found, 8000, 49152)
    assert ready["seconds"]["weights"] > 0
    said = Follower(tmp_path / "service" / "progress.jsonl")
    said.read()
    texts = [text for _, text in said.state.milestones]
    assert "loading weights" in texts
    assert "KV pool of 20,000 tokens" in texts
    # A prompt that is too long is refused; the server lives on.
    with pytest.raises(urllib.error.HTTPError):
        info.ask(endpoint.url, "/generate", {"input_ids": [1] * 9000, "sampling_params": {"max_new_tokens": 1}})
    assert server.one_token(endpoint.url, 60)
    os.killpg(popen.pid, signal.SIGKILL)
    popen.wait()
    deadline = time.monotonic() + 15
    while living(pids) or (endpoint.root or tmp_path).exists():
        assert time.monotonic() < deadline, living(pids)
        time.sleep(0.1)
    assert not listens(endpoint.url)


def test_a_server_with_the_draft_ends_in_time(inputs: dict[str, str], tmp_path: Path, sglang_python: str) -> None:
    popen, ready = started("serve_drafted", inputs, tmp_path / "service", sglang_python)
    (endpoint,) = server.endpoints(ready)
    pids = keeper.descendants(popen.pid)
    assert (ready["info"]["speculative"], endpoint.root) == ("EAGLE3", None)
    body = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}}
    answer = info.ask(endpoint.url, "/generate", body, 120)
    assert len(answer["output_ids"]) == 8
    assert answer["meta_info"]["spec_verify_ct"] >= 1
    begun = time.monotonic()
    os.killpg(popen.pid, signal.SIGTERM)
    assert popen.wait(20) == 128 + signal.SIGTERM
    # After five seconds the runner kills the service.
    assert time.monotonic() - begun < 5
    assert not living(pids)
    assert not listens(endpoint.url)


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (
            {"mem-fraction-static": 0.0001},
            "out of memory (ValueError: Loaded weights leave no GPU memory for the KV cache",
        ),
        ({"attention-backend": "nonsense"}, "SGLang refuses its flags: argument --attention-backend: invalid choice"),
    ],
)
def test_the_cause_of_a_crash(
    args: dict[str, Any], text: str, tmp_path: Path, smollm2: Path, sglang_python: str
) -> None:
    config = Server(python=sglang_python, args={"device": "cpu", **args}, captures=str(tmp_path))
    with (
        pytest.raises(UserError) as error,
        server.started(config, smollm2, "float32", tmp_path / "s", Silent()),
    ):
        pytest.fail("started")
    assert f"the server did not start: {text}" in str(error.value)
    assert json.loads((tmp_path / "s" / "orders.json").read_text())["layers"] is None
