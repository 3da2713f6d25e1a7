"""SGLang's log: how far a start is, and why it failed. Lines as 0.5.17 and 0.5.23 write them."""

import time
from pathlib import Path

import pytest

from eyas.engines.sglang import crash
from eyas.engines.sglang.milestones import Milestones, Watch, is_access, pieces

LOG = """\
[2026-11-30 19:05:52] \x1b[1;33m'--disable-cuda-graph' is deprecated.\x1b[0m
[2026-11-30 19:06:13 TP0] Load weight begin. avail mem=139.10 GB
[2026-11-30 19:06:13 TP1] Load weight begin. avail mem=139.10 GB
\rLoading safetensors checkpoint shards:   0% Completed | 0/4 [00:00<?, ?it/s]
\rLoading safetensors checkpoint shards:  25% Completed | 1/4 [00:01<00:03,  1.1s/it]
\rLoading safetensors checkpoint shards: 100% Completed | 4/4 [00:04<00:00,  1.1s/it]\rLoading done
[2026-11-30 19:06:18 TP1] Load weight end. elapsed=9.99 s, type=Qwen3ForCausalLM, avail mem=131 GB, mem usage=8.1 GB.
[2026-11-30 19:06:18 TP0] Load weight end. elapsed=4.50 s, type=Qwen3ForCausalLM, avail mem=131 GB, mem usage=8.1 GB.
[2026-11-30 19:06:19 TP0] KV Cache is allocated. dtype: torch.bfloat16, #tokens: 4578, K size: 0.43 GB, V size: 0.43 GB
[2026-11-30 19:06:19 TP0] Capture target decode cuda graph begin. backend=full, bs=[1, 2], avail mem=21.00 GB
\r  0%|          | 0/2 [00:00<?, ?it/s]
\rCapturing batches (bs=2 avail_mem=20.93 GB):   0%|          | 0/2 [00:00<?, ?it/s]
\rCapturing batches (bs=1 avail_mem=20.10 GB):  50%|█████     | 1/2 [00:00<00:00,  1.25it/s]
[2026-11-30 19:06:21 TP0] Capture target decode cuda graph end. elapsed=2.25 s, mem usage=0.9 GB, avail mem=20.1 GB.
[2026-11-30 19:06:21 TP0] Capture target prefill CUDA graph end. elapsed=1.00 s, mem usage=0.9 GB, avail mem=19 GB.
[2026-11-30 19:06:22 TP0] max_total_num_tokens=4578, chunked_prefill_size=8192, context_len=262144, available_gpu_mem=1
[2026-11-30 19:06:22] INFO:     Uvicorn running on http://127.0.0.1:31517 (Press CTRL+C to quit)
[2026-11-30 19:06:23] INFO:     127.0.0.1:39080 - "POST /generate HTTP/1.1" 503 Service Unavailable
[2026-11-30 19:06:24] The server is fired up and ready to roll!
"""


class Told:
    """A progress that remembers in order."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def total(self, amount: float, unit: str, done: float = 0) -> None:
        self.said.append(f"{done}/{amount} {unit}")

    def advance(self, amount: float) -> None:
        self.said.append(f"+{amount}")

    def milestone(self, text: str) -> None:
        self.said.append(text)

    def metric(self, **values: float) -> None:
        self.said.append(str(values))


def test_milestones_of_a_start() -> None:
    told = Told()
    found = Milestones(told)
    for line in pieces(LOG):
        found.feed(line)
    assert told.said == [
        "loading weights",
        "0/4 shards",
        "+1",
        "+3",
        "{'weights_seconds': 4.5}",
        "weights loaded in 4.5 s",
        "KV pool of 4,578 tokens",
        "{'kv_tokens': 4578}",
        "capturing target decode cuda graphs",
        "0/2 graphs",
        "+1",
        "{'graphs_seconds': 2.25}",
        "{'graphs_seconds': 1.0}",
        "{'kv_tokens': 4578, 'context_length': 262144}",
        "server listens, warming up",
        "server is warm",
    ]
    assert found.seconds == {"weights": 4.5, "graphs": 3.25}
    assert found.last.endswith("ready to roll!")


def test_our_own_questions_are_no_sign_of_life(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    with Watch(log, Told()) as watch:
        begun = watch.lively
        log.write_text('[2026-11-30 19:06:23] INFO:     127.0.0.1:1 - "POST /generate HTTP/1.1" 503\n')
        time.sleep(0.5)
        assert watch.lively == begun
        with log.open("a") as file:
            file.write("half a li")
            file.flush()
            time.sleep(0.5)
            file.write("ne\n")
        time.sleep(0.5)
        assert watch.lively > begun
    assert watch.milestones.last == "half a line"
    assert is_access('x "GET /health HTTP/1.1" 200')


SCHEDULER_DIED = """\
[2026-11-30 19:06:18 TP0] Scheduler hit an exception: Traceback (most recent call last):
  File "scheduler.py", line 3, in run
    raise Wrong
{}

[2026-11-30 19:06:19] SIGQUIT received. signum=None, frame=None. It usually means one child failed.
Traceback (most recent call last):
  File "launch_server.py", line 9, in <module>
    server()
EOFError
Traceback (most recent call last):
RuntimeError: Rank 0 scheduler died during initialization (exit code: 1). Please see the error messages above
"""


@pytest.mark.parametrize(
    ("log", "said"),
    [
        (SCHEDULER_DIED.format("ValueError: head size 7 is odd"), "ValueError: head size 7 is odd"),
        (SCHEDULER_DIED.format("some.module.OddError"), "some.module.OddError"),
        (
            SCHEDULER_DIED.format("RuntimeError: Not enough memory. Please try to increase --mem-fraction-static."),
            "out of memory (RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.): raise",
        ),
        (
            "[2026-11-30 19:06:18] Scheduler: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB",
            "out of memory (Scheduler: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB): lower",
        ),
        (
            "usage: sglang serve [-h]\nsglang serve: error: unrecognized arguments: --foo 3",
            "this SGLang does not know --foo 3: take it out of server.args",
        ),
        (
            "sglang serve: error: argument --tp: invalid int value: 'x'",
            "SGLang refuses its flags: argument --tp: invalid int value: 'x'; see server.args",
        ),
        (
            "python3: Error while finding module specification for 'sglang.launch_server' (ModuleNotFoundError: No "
            "module named 'sglang')",
            "py has no SGLang: name the interpreter that has it in server.python",
        ),
        (
            "ERROR:    [Errno 98] error while attempting to bind on address ('127.0.0.1', 1): address already in use",
            "its port is in use: take another in server.port, or leave that out",
        ),
    ],
)
def test_causes(log: str, said: str) -> None:
    assert (crash.cause(pieces(log), "py") or "").startswith(said)


def test_no_cause() -> None:
    assert crash.cause(pieces("[2026-11-30 19:06:13] Ignore import error: No module named 'sglang.x'")) is None
    assert crash.tail(Path("/nowhere")) == []
    assert crash.by_code(137).startswith("killed by the system")
    assert crash.by_code(134) == "ended by signal 6"
    assert crash.by_code(3) == "ended with exit code 3"
