"""`eyas bench`: running servers of both engines, alone and against each other."""

import json
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from eyas import cli
from eyas.bench import command, workloads
from eyas.bench.measure import Prompt
from eyas.config import Bench
from eyas.engines import target as targets
from eyas.engines import vllm
from eyas.errors import UserError
from eyas.progress import Silent
from fakesglang import FakeServer
from fakevllm import FakeVLLM

CONFIG = Bench(prompts=3, max_new_tokens=12, rounds=2, concurrencies=[1, 2])
ANSWER = [40, 41, 42, 43, 44, 45, 46, 2]


Eyas = Callable[..., tuple[int, str, str]]


@pytest.fixture
def eyas(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Eyas:
    """Runs a command; gives exit code, stdout and stderr."""

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["eyas", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        said = capfd.readouterr()
        return int(ended.value.code or 0), said.out, said.err

    return call


@pytest.fixture
def plain(tiny_llama: Path, tmp_path: Path) -> Iterator[FakeServer]:
    server = FakeServer(tiny_llama, tmp_path / "plain")
    yield server
    server.close()


@pytest.fixture
def drafted(tiny_llama: Path, tmp_path: Path) -> Iterator[FakeServer]:
    server = FakeServer(tiny_llama, tmp_path / "drafted")
    server.draft_tokens = 3
    server.facts = {"speculative_algorithm": "EAGLE3", "speculative_num_steps": 3}
    yield server
    server.close()


def test_two_sglang_servers_are_measured_in_turns(plain: FakeServer, drafted: FakeServer) -> None:
    found = command.bench(plain.url, drafted.url, None, CONFIG, Silent())
    assert [row["concurrency"] for row in found["bench"]] == [1, 2]
    for row in found["bench"]:
        assert row["plain"]["tokens"] == row["draft"]["tokens"] > 0
        assert row["lossless"]
        assert row["answers"]["equal"] == row["answers"]["steady"]
        assert row["draft_tokens"] == 3
        assert row["ratio"]["ratio"] > 0
        assert row["break_even"] > 0
        rounds = row["acceptance"]["rounds"] + row["acceptance"]["looping"]["rounds"]
        assert sum(part["rounds"] + part["looping"]["rounds"] for part in row["by_context"]) == rounds > 0


def test_one_server_alone_gives_its_own_side(plain: FakeServer, drafted: FakeServer) -> None:
    (row, _) = command.bench(plain.url, None, None, CONFIG, Silent())["bench"]
    assert row["draft"] is row["ratio"] is row["acceptance"] is None
    (row, _) = command.bench(drafted.url, None, None, CONFIG, Silent())["bench"]
    assert row["plain"] is row["ratio"] is None
    assert row["acceptance"]["draft_tokens"] == 3


def test_vllm_is_counted_by_the_difference_of_its_counters(tiny_llama: Path, tmp_path: Path) -> None:
    """Counts from before are not ours; each answer of 8 tokens takes 4 steps, each with one accepted draft."""
    plain, drafted = FakeVLLM(tiny_llama, ANSWER), FakeVLLM(tiny_llama, ANSWER, drafting=True)
    drafted.stray = 1000
    try:
        found = command.bench(plain.url, drafted.url, None, CONFIG, Silent())
        assert [one["engine"] for one in found["servers"]] == ["vLLM 0.25.fake"] * 2
        assert [one["draft_tokens"] for one in found["servers"]] == [None, 2]
        for row in found["bench"]:
            assert row["acceptance"]["accept_length"] == 2.0
            assert row["acceptance"]["rounds"] == 4 * row["draft"]["requests"]
            assert row["lossless"]
        assert len({body["cache_salt"] for body in drafted.seen}) == len(drafted.seen)
    finally:
        plain.close()
        drafted.close()


def test_counts_that_these_answers_cannot_explain_are_refused(tiny_llama: Path) -> None:
    server = FakeVLLM(tiny_llama, ANSWER, drafting=True)
    steps = server.steps

    def busy() -> list[list[int]]:
        server.stray += 10  # somebody else's request at the same time
        return steps()

    server.steps = busy  # type: ignore[method-assign]
    try:
        with pytest.raises(UserError, match="somebody else uses this server"):
            command.bench(server.url, None, None, CONFIG, Silent())
    finally:
        server.close()


def test_counters_over_engines_are_added_and_a_restart_is_seen() -> None:
    one = vllm.Counters(7, 7, (7, 0))
    assert vllm.parse("") is None
    lines = "\n".join(
        f'vllm:spec_decode_num_drafts_total{{engine="{n}"}} 3\n'
        f'vllm:spec_decode_num_accepted_tokens_total{{engine="{n}"}} 2\n'
        f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="{n}",position="0"}} 2.0\n'
        f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="{n}",position="1"}} 0.0'
        for n in range(2)
    )
    assert vllm.parse(lines) == vllm.Counters(6, 4, (4, 0))
    assert one.since(vllm.Counters(3, 2, (2, 0))) == vllm.Counters(4, 5, (5, 0))
    with pytest.raises(UserError, match="started anew"):
        vllm.Counters(1, 1, (1, 0)).since(one)


def test_random_tokens_are_refused_and_text_is_not(tiny_llama: Path) -> None:
    """The target judges; one that finds plain questions as improbable as noise judges nothing."""
    target = targets.inspect(str(tiny_llama), Silent())
    picked = random.Random(0)
    asked = [Prompt(str(i), [picked.randrange(3, 250) for _ in range(40)]) for i in range(4)]
    noise = {tuple(prompt.ids) for prompt in asked}

    def judge(ids: list[int]) -> list[float]:
        rare = any(tuple(ids[:9]) == known[:9] for known in noise)
        return [-9.0 if rare else -3.0] * (len(ids) - 1)

    with pytest.raises(UserError, match=r"mine\.jsonl: looks like random tokens"):
        workloads.refuse_random("mine.jsonl", asked, target, judge)
    workloads.refuse_random("mine.jsonl", asked, target, lambda ids: [-3.0] * (len(ids) - 1))
    workloads.refuse_random("mine.jsonl", asked, target, lambda ids: [-9.0] * (len(ids) - 1))
    workloads.refuse_random("heldout@200", asked, target, judge)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["not-an-address"], "no address of a server"),
        (["http://127.0.0.1:1"], "127.0.0.1:1"),
        (["http://127.0.0.1:99999"], "no address of a server"),
        (["http://127.0.0.1:abc"], "no address of a server"),
        (["http://[::1"], "no address of a server"),
        (["http://127.0.0.1:1", "--concurrency", "1;2"], "write numbers with commas"),
        (["http://127.0.0.1:1", "--concurrency", "0"], "concurrencies"),
        (["http://127.0.0.1:1", "--rounds", "0"], "rounds"),
    ],
)
def test_bad_input_is_one_line(eyas: Eyas, arguments: list[str], said: str) -> None:
    code, out, error = eyas("bench", *arguments)
    assert (code, out) == (2, "")
    assert said in error
    assert len(error.splitlines()) == 1


def test_a_drafted_server_is_no_baseline(plain: FakeServer, drafted: FakeServer) -> None:
    with pytest.raises(UserError, match="give the plain server first"):
        command.bench(drafted.url, plain.url, None, CONFIG, Silent())


def test_the_table_names_every_figure(eyas: Eyas, plain: FakeServer, drafted: FakeServer) -> None:
    asked = ["bench", plain.url, "--against", drafted.url, "--prompts", "3", "--max-new-tokens", "12", "--rounds", "2"]
    code, out, error = eyas(*asked)
    assert code == 0, error
    for word in ("first token", "accept", "ratio", "3 draft tokens", "by position", "heldout"):
        assert word in out
    code, out, _ = eyas(*asked, "--json")
    assert code == 0
    assert json.loads(out)["bench"][0]["ratio"]["ratio"] > 0
