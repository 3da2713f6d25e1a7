"""Launching a server: its command, its start, the ways in which that fails, and that nothing of it is left."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from eyas.config import Flag, Server
from eyas.engines.sglang import command, crash, kept, server
from eyas.errors import UserError
from eyas.progress import Silent

FAKE = Path(__file__).parents[1] / "fakeserver"
MODEL = Path("/models/m")


class Said(Silent):
    """A progress that remembers."""

    def __init__(self) -> None:
        self.milestones: list[str] = []
        self.metrics: dict[str, float] = {}

    def milestone(self, text: str) -> None:
        self.milestones.append(text)

    def metric(self, **values: float) -> None:
        self.metrics |= values


def fake(mode: str = "", tmp: Path | None = None, **how: Any) -> Server:
    env = {"PYTHONPATH": str(FAKE), "FAKE": mode}
    return Server.model_validate({"python": sys.executable, "env": env, "patience": 20.0, "captures": str(tmp), **how})


def processes(folder: Path) -> list[int]:
    """Processes that have the folder's mark, and the fake's children, which sleep for 600 s."""
    return kept.marked(kept.mark_of(folder)) + sleepers()


def sleepers() -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if b"import time; time.sleep(600)\0" in path.read_bytes():
                found.append(int(path.parent.name))
    return found


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    before = set(sleepers())
    yield
    assert set(sleepers()) <= before


def gone(folder: Path, seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while processes(folder) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not processes(folder)


def test_a_server_starts_answers_and_leaves_nothing(tmp_path: Path) -> None:
    said = Said()
    with server.started(fake(tmp=tmp_path), MODEL, "float32", tmp_path / "s", said, layers=(1, 3, 5)) as running:
        assert running.alive()
        assert len(processes(tmp_path / "s")) >= 4
        root = running.endpoint.root
        assert root is not None
        assert root == tmp_path / f"eyas-{os.getuid()}" / kept.mark_of(tmp_path / "s")
        assert root.stat().st_mode & 0o777 == 0o700
        orders = json.loads((tmp_path / "s" / "orders.json").read_text())
        assert (orders["root"], orders["layers"]) == (str(root), [1, 3, 5])
        assert (tmp_path / "s" / "plugin" / "eyas").is_dir()
        assert running.seconds["weights"] == 1.36
        port = int(running.endpoint.url.rpartition(":")[2])
    assert not running.alive()
    assert processes(tmp_path / "s") == []
    assert not root.exists()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
    server._require_free(port)
    assert "KV pool of 20,000 tokens" in said.milestones
    assert said.metrics["kv_tokens"] == 20000
    ready = {"servers": [running.endpoint.to_json()]}
    assert server.endpoints(json.loads(json.dumps(ready))) == [running.endpoint]


def test_a_port_that_somebody_else_was_quicker_to_take_is_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said = Said()
    with server.started(fake("port taken", tmp_path), MODEL, "float32", tmp_path / "s", said) as running:
        assert running.alive()
        assert running.endpoint.root is not None
        assert running.endpoint.root.is_dir()
        taken = int(running.endpoint.url.rpartition(":")[2])
    assert any("another one" in text for text in said.milestones)
    (tmp_path / "taken").unlink()
    with (
        pytest.raises(UserError, match="its port is in use"),
        server.started(fake("port taken", tmp_path, port=taken), MODEL, "float32", tmp_path / "s", Silent()),
    ):
        pass
    assert gone(tmp_path / "s")


@pytest.mark.parametrize(
    ("mode", "text"),
    [
        (
            "out of memory",
            "out of memory (torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.): lower",
        ),
        ("fault", "the server did not start: ValueError: no such kernel; log: "),
        ("kill", "killed by the system (for want of memory?) or by somebody; log: "),
        ("no plugin", "the capture plugin was not loaded by rank 0 of the server; log: "),
        ("problem", "the capture plugin cannot capture from this server: layers cannot be told; log: "),
    ],
)
def test_a_start_that_fails_says_why(tmp_path: Path, mode: str, text: str) -> None:
    with pytest.raises(UserError) as error, server.started(fake(mode, tmp_path), MODEL, "auto", tmp_path / "s", Said()):
        pytest.fail("started")
    assert text in str(error.value)
    assert "\n" not in str(error.value)
    assert processes(tmp_path / "s") == []


def test_no_capture_root_is_left_of_a_start_that_fails(tmp_path: Path) -> None:
    config = fake(tmp=tmp_path, python="/nowhere/python")
    with pytest.raises(UserError), server.started(config, MODEL, "auto", tmp_path / "s", Said()):
        pytest.fail("started")
    assert list((tmp_path / f"eyas-{os.getuid()}").iterdir()) == []


def test_what_a_server_survived_did_not_end_it() -> None:
    old = [
        "RuntimeError: CUDA out of memory",
        '[2026-11-30 19:06:19] INFO: 1.2.3.4:5 - "POST /generate HTTP/1.1" 200 OK',
    ]
    assert crash.cause(old) is None
    assert crash.cause(["[2026-11-30 19:06:19] retrying, out of memory is near"]) is None
    assert crash.cause([*old, "Traceback (most recent call last):", "  File", "ValueError: odd"]) == "ValueError: odd"
    assert crash.by_code(137) == "killed by the system (for want of memory?) or by somebody"


def test_flags_and_interpreters_that_are_wrong(tmp_path: Path) -> None:
    taken = socket.socket()
    taken.bind(("127.0.0.1", 0))
    taken.listen()
    for how, text in (
        ({"args": {"foo": True}}, "this SGLang does not know --foo: take it out of server.args"),
        ({"python": "/nowhere/python"}, "server.python: /nowhere/python is not there or cannot be run"),
        ({"env": {"PYTHONPATH": ""}}, f"{sys.executable} has no SGLang: name the interpreter that has it"),
        ({"port": taken.getsockname()[1]}, "is in use: end what listens there"),
        ({"captures": "/proc/x"}, "server.captures: cannot make /proc/x/eyas-"),
        ({"args": {"api-key": "x"}}, "server.args api-key: eyas asks without one"),
    ):
        with (
            pytest.raises(UserError) as error,
            server.started(fake(tmp=tmp_path, **how), MODEL, "auto", tmp_path / "s", Said()),
        ):
            pytest.fail("started")
        assert text in str(error.value)
    taken.close()


def test_patience_ends_with_silence_not_with_time(tmp_path: Path) -> None:
    for mode in ("silent", "never ready"):
        config = fake(mode, tmp_path, patience=1.0)
        with pytest.raises(UserError) as error, server.started(config, MODEL, "auto", tmp_path / "s", Said()):
            pytest.fail("started")
        assert "no sign of life for " in str(error.value)
        assert "(server.patience), its last: [2026-11-30 19:06:18] max_total_num_tokens=20000" in str(error.value)


PROGRAM = """
import sys
from pathlib import Path
from eyas.engines.sglang import server
from eyas.progress import Silent
sys.path.insert(0, sys.argv[1])
from test_server_launch import MODEL, fake
tmp = Path(sys.argv[2])
with server.started(fake(sys.argv[3], tmp), MODEL, "auto", tmp / "s", Silent()) as running:
    print("ready", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("victim", ["starter", "keeper", "both"])
def test_no_process_outlives_a_killed_starter_or_keeper(tmp_path: Path, victim: str) -> None:
    command = [sys.executable, "-c", PROGRAM, str(Path(__file__).parent), str(tmp_path)]
    # Without a keeper, a process without parent, session and environment cannot be told from a stranger's.
    command.append("" if victim == "starter" else "keep environment")
    starter = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
    assert starter.stdin is not None
    assert starter.stdout is not None
    assert starter.stdout.readline() == b"ready\n"
    (keeper,) = (int(p) for p in Path(f"/proc/{starter.pid}/task/{starter.pid}/children").read_text().split())
    if victim in ("keeper", "both"):
        os.kill(keeper, signal.SIGKILL)
    if victim in ("starter", "both"):
        os.killpg(starter.pid, signal.SIGKILL)
    if victim == "keeper":
        starter.stdin.close()
    starter.wait()
    starter.stdout.close()
    starter.stdin.close()
    if victim == "starter":
        assert gone(tmp_path / "s")
        deadline = time.monotonic() + 10  # the keeper removes captures once the processes have gone
        while list((tmp_path / f"eyas-{os.getuid()}").iterdir()) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not list((tmp_path / f"eyas-{os.getuid()}").iterdir())
    # What only a killed keeper can leave is found by the next start.
    with server.started(fake(tmp=tmp_path), MODEL, "auto", tmp_path / "s", Said()) as running:
        assert running.alive()
    assert gone(tmp_path / "s")


def test_command_line() -> None:
    args: dict[str, Flag | None] = {
        "disable-radix-cache": True, "enable-lora": False, "lora-paths": ["a", "b"], "chunked-prefill-size": -1,
        "context-length": None, "mem-fraction-static": 0.9, "served-model-name": "-x",
    }  # fmt: skip
    config = Server(tp=2, trust_remote_code=True, args=args)
    line = command.command(config, MODEL, "bfloat16", 9, command.flags(config, None, {"context-length": 64}))
    assert " ".join(line) == (
        "python3 -m sglang.launch_server --model-path /models/m --port 9 --tp 2 --dtype bfloat16 --host 127.0.0.1 "
        "--trust-remote-code --disable-radix-cache --lora-paths a b --chunked-prefill-size=-1 --context-length 64 "
        "--mem-fraction-static 0.9 --served-model-name=-x"
    )
    assert "--dtype" not in command.command(config, MODEL, "auto", 9, {})


def test_what_a_cpu_and_a_draft_add() -> None:
    config = Server(args={"device": "cpu", "max-total-tokens": 500})
    args = command.flags(config, command.Draft(Path("/d"), 3), {})
    assert args["max-total-tokens"] == 500
    assert args["mem-fraction-static"] == 0.3
    assert args["disable-cuda-graph"] is True
    assert args["prefill-attention-backend"] == "intel_amx"
    assert args["speculative-draft-attention-backend"] == "intel_amx"
    assert (args["speculative-num-steps"], args["speculative-num-draft-tokens"]) == (3, 4)
    on_gpu = command.flags(Server(), command.Draft(Path("/d"), 5), {})
    assert on_gpu == {
        "speculative-algorithm": "EAGLE3",
        "speculative-draft-model-path": "/d",
        "speculative-num-steps": 5,
        "speculative-eagle-topk": 1,
        "speculative-num-draft-tokens": 6,
    }


def test_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/mine")
    monkeypatch.delenv("SGLANG_PLUGINS", raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    plain = command.environment(Server(), False, "m", None)
    assert plain["PYTHONPATH"] == "/mine"
    assert {"EYAS_CAPTURE", "SGLANG_PLUGINS", "SGLANG_USE_CPU_ENGINE"}.isdisjoint(plain)
    env = command.environment(Server(env={"SGLANG_PLUGINS": "a, b", "X": "1"}), True, "m", tmp_path)
    first, shim, last = env["PYTHONPATH"].split(os.pathsep)
    assert (first, last, env["X"]) == (str(tmp_path / "plugin"), "/mine", "1")
    assert (Path(shim) / "sitecustomize.py").is_file()
    assert (env["EYAS_CAPTURE"], env["SGLANG_PLUGINS"]) == (str(tmp_path / "orders.json"), "a,b,eyas")
    assert (env["SGLANG_USE_CPU_ENGINE"], env["OMP_NUM_THREADS"]) == ("1", str(len(os.sched_getaffinity(0))))
    assert command.environment(Server(env={"SGLANG_PLUGINS": "eyas"}), False, "m", tmp_path)["SGLANG_PLUGINS"] == "eyas"


def test_the_capture_root_is_private(tmp_path: Path) -> None:
    config = Server(captures=str(tmp_path))
    (server.capture_root(config, "m") / "old").touch()
    assert list(server.capture_root(config, "m").iterdir()) == []
    (tmp_path / f"eyas-{os.getuid()}").chmod(0o755)
    with pytest.raises(UserError, match="others may enter"):
        server.capture_root(config, "m")
    with pytest.raises(UserError, match="name one folder"):
        server.capture_root(Server(captures=["a", "b"]), "m")


def test_a_busy_server_is_no_dead_one(tmp_path: Path) -> None:
    with server.started(fake(tmp=tmp_path), MODEL, "auto", tmp_path / "s", Said()) as running:
        os.kill(running.pid, signal.SIGSTOP)
        waits = threading.Thread(target=server.one_token, args=(running.endpoint.url, 20.0))
        waits.start()
        time.sleep(0.3)
        assert waits.is_alive()
        assert running.alive()
        os.kill(running.pid, signal.SIGCONT)
        waits.join()
