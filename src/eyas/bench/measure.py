"""Timed requests to a server: one pass of prompts at a concurrency is a block, and blocks are what figures come from.

A figure is never one block: blocks of the plain and of the drafted server are taken in turns or in rounds, and the
interval comes from their spread. A pass over a few prompts that is thrown away goes first, since the first requests of
a server compile kernels and fill caches.
"""

import math
import statistics
import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from eyas.bench.counts import tally_of
from eyas.capture import witness
from eyas.decode.acceptance import Tally, summary
from eyas.decode.replay import pooled
from eyas.decode.step import student
from eyas.engines.sglang import client
from eyas.engines.sglang.answers import answer_of
from eyas.engines.sglang.http import Connection, Transient
from eyas.engines.sglang.pool import fan_out
from eyas.errors import UserError
from eyas.progress import Progress, Silent

WARM_UP = 2
"""Prompts of the discarded pass, for each request that is to be under way."""


@dataclass(frozen=True)
class Prompt:
    """One prompt of a workload."""

    key: str
    ids: list[int]


@dataclass(frozen=True)
class Load:
    """How prompts are asked."""

    concurrency: int
    max_new_tokens: int
    temperature: float = 0.0
    draft_tokens: int | None = None
    """Of the server; None: it serves without a draft."""


@dataclass(frozen=True)
class Request:
    """One answered prompt. Times are seconds from when it was sent."""

    key: str
    ids: list[int]
    seconds: float
    first: float
    """To the first token."""
    gaps: list[float]
    """Between one streamed piece and the next, divided by the tokens that came in it."""
    tally: Tally | None
    """What the draft contributed; None: there is none."""
    exact: bool
    """Whether the tally's split by position is certain (`bench/counts.py`)."""


@dataclass(frozen=True)
class Block:
    """One pass: every prompt once."""

    seconds: float
    """From the first request sent to the last answer."""
    concurrency: int
    requests: list[Request]

    @property
    def tokens(self) -> int:
        """All tokens of all answers."""
        return sum(len(request.ids) for request in self.requests)

    @property
    def tokens_per_second(self) -> float:
        """Of all requests together."""
        return self.tokens / self.seconds

    @property
    def rounds(self) -> int:
        """Verify steps of all requests."""
        return sum(request.tally.rounds for request in self.requests if request.tally)

    def to_json(self) -> dict[str, Any]:
        """For a file."""
        return asdict(self)

    @classmethod
    def from_json(cls, said: dict[str, Any]) -> "Block":
        """From a file that `to_json` made."""
        rows = [{**row, "tally": Tally(**row["tally"]) if row["tally"] else None} for row in said["requests"]]
        return cls(said["seconds"], said["concurrency"], [Request(**row) for row in rows])


class Asker(Protocol):
    """A server of any engine."""

    url: str

    def ask(self, connection: Connection, prompt: Prompt, load: Load) -> Request:
        """One answer, streamed and timed. Raises UserError, ServerDied; Transient: it failed."""
        ...


class SGLang:
    """An SGLang server; token ids in and out."""

    def __init__(self, url: str, eos: Sequence[int], vocab_size: int) -> None:
        self.url, self._eos, self._vocab_size = url, list(eos), vocab_size

    def ask(self, connection: Connection, prompt: Prompt, load: Load) -> Request:
        """See Asker. The request shares no prefix with any other, whatever the server keeps."""
        sampling = {
            "temperature": load.temperature,
            "max_new_tokens": load.max_new_tokens,
            "stop_token_ids": self._eos,
        }
        body = {
            "input_ids": prompt.ids,
            "sampling_params": sampling,
            "extra_key": uuid.uuid4().hex,
            "stream": True,
        }
        began, events, times = time.perf_counter(), [], []
        for event in connection.stream("/generate", body):
            events.append(event)
            times.append(time.perf_counter() - began)
        seconds = time.perf_counter() - began
        ids, _ = answer_of(self.url, events[-1] if events else {}, self._eos, self._vocab_size)
        tally, exact = None, True
        if load.draft_tokens is not None:
            tally, exact = tally_of(self.url, events, len(ids), load.draft_tokens)
        counts = [int(event["meta_info"]["completion_tokens"]) for event in events]
        return Request(prompt.key, ids, seconds, times[0], gaps_of(times, counts), tally, exact)

    def logprobs(self, ids: list[int]) -> list[float]:
        """Log-probabilities of all ids but the first, by the target. Raises UserError, ServerDied."""
        said = client.generate(self.url, witness.body(ids)).get("meta_info", {}).get("input_token_logprobs")
        if not isinstance(said, list) or len(said) != len(ids) or any(row[0] is None for row in said[1:]):
            raise UserError(f"{self.url}: replies lack the prompt's input_token_logprobs: update SGLang")
        return [float(row[0]) for row in said[1:]]


def gaps_of(times: Sequence[float], counts: Sequence[int]) -> list[float]:
    """Seconds a token of each streamed piece after the first, from arrival times and tokens known by then."""
    pieces = zip(times, times[1:], counts, counts[1:], strict=False)
    return [(now - before) / (count - had) for before, now, had, count in pieces if count > had]


def block(server: Asker, prompts: Sequence[Prompt], load: Load, progress: Progress) -> Block:
    """One pass: every prompt once, `load.concurrency` under way at once; requests in the prompts' order.

    Raises UserError: a request failed; ServerDied.
    """
    assert prompts, "a block needs a prompt"

    def work(connection: Connection, number: int, job: tuple[int, Prompt]) -> tuple[int, Request]:
        try:
            found = server.ask(connection, job[1], load)
        except Transient as error:
            raise UserError(f"{server.url}: a timed request failed, so the figure is void ({error})") from error
        progress.advance(1)
        return job[0], found

    began = time.perf_counter()
    found = list(fan_out([server.url], enumerate(prompts), work, concurrency=load.concurrency))
    seconds = time.perf_counter() - began
    return Block(seconds, load.concurrency, [request for _, request in sorted(found, key=lambda pair: pair[0])])


def warm_up(server: Asker, prompts: Sequence[Prompt], load: Load) -> None:
    """A pass that is thrown away."""
    few = [prompts[i % len(prompts)] for i in range(WARM_UP * load.concurrency)]
    block(server, few, load, Silent())


def figures(blocks: Sequence[Block]) -> dict[str, Any]:
    """FIG of docs/seams.md: rates of each block and their median, and latencies of all requests together."""
    firsts = [request.first for block in blocks for request in block.requests]
    gaps = [gap for block in blocks for request in block.requests for gap in request.gaps]
    return {
        "tokens_per_second": statistics.median(block.tokens_per_second for block in blocks),
        "rounds": [round(block.tokens_per_second, 3) for block in blocks],
        "first_token": percentiles(firsts),
        "inter_token": percentiles(gaps),
        "tokens": sum(block.tokens for block in blocks),
        "requests": sum(len(block.requests) for block in blocks),
    }


def percentiles(values: Sequence[float]) -> dict[str, float | None]:
    """Median and 99th percentile (nearest rank); null of nothing."""
    ordered = sorted(values)
    return {
        f"p{share}": ordered[min(len(ordered) - 1, math.ceil(share / 100 * len(ordered)) - 1)] if ordered else None
        for share in (50, 99)
    }


def ratio(plain: Sequence[Block], draft: Sequence[Block]) -> dict[str, float | None]:
    """How many times as fast the second blocks are, with a 95 % interval; `low` and `high` null where none is possible.

    One request at a time: the geometric mean over prompts of the ratio of seconds a token, since prompts differ more
    than rounds do. Several: the ratio of tokens a second of whole blocks. The interval is Student's, over prompts or
    rounds, of the logarithms.
    """
    if all(block.concurrency == 1 for block in (*plain, *draft)):
        one, other = _by_prompt(plain), _by_prompt(draft)
        logs = [math.log(one[key] / other[key]) for key in one if key in other]
        return _interval(logs)
    rates = ([block.tokens_per_second for block in blocks] for blocks in (plain, draft))
    return rates_ratio(*rates)


def rates_ratio(plain: Sequence[float], other: Sequence[float]) -> dict[str, float | None]:
    """How many times as large the second rates are, with Welch's 95 % interval of the logarithms' means."""
    logs = [[math.log(rate) for rate in rates] for rates in (plain, other)]
    middle = statistics.mean(logs[1]) - statistics.mean(logs[0])
    if min(map(len, logs)) < 2:
        return {"ratio": math.exp(middle), "low": None, "high": None}
    parts = [statistics.variance(one) / len(one) for one in logs]
    error = math.sqrt(sum(parts))
    # Welch's degrees of freedom; equal blocks have no variance at all.
    below = sum(part**2 / (len(one) - 1) for part, one in zip(parts, logs, strict=True))
    return _around(middle, error, sum(parts) ** 2 / below if below else math.inf)


def mean_ratio(ratios: Sequence[dict[str, float | None]]) -> dict[str, float | None]:
    """The geometric mean of independent ratios, with the interval that follows from theirs."""
    logs = [math.log(found["ratio"]) for found in ratios if found["ratio"]]
    if len(logs) < len(ratios) or not logs:
        return {"ratio": None, "low": None, "high": None}
    middle, halves = statistics.mean(logs), [_half(found) for found in ratios]
    if None in halves:
        return {"ratio": math.exp(middle), "low": None, "high": None}
    half = math.sqrt(sum(one * one for one in halves if one is not None)) / len(logs)
    return {"ratio": math.exp(middle), "low": math.exp(middle - half), "high": math.exp(middle + half)}


def _half(found: dict[str, float | None]) -> float | None:
    """Half the width of a ratio's interval, in logarithms."""
    low, high = found["low"], found["high"]
    return (math.log(high) - math.log(low)) / 2 if low and high else None


def _by_prompt(blocks: Sequence[Block]) -> dict[str, float]:
    """Mean seconds a token of each prompt."""
    spent: dict[str, list[float]] = {}
    for block in blocks:
        for request in block.requests:
            spent.setdefault(request.key, []).append(request.seconds / max(1, len(request.ids)))
    return {key: statistics.mean(values) for key, values in spent.items()}


def _interval(logs: Sequence[float]) -> dict[str, float | None]:
    if not logs:
        return {"ratio": None, "low": None, "high": None}
    middle = statistics.mean(logs)
    if len(logs) < 3:
        return {"ratio": math.exp(middle), "low": None, "high": None}
    return _around(middle, statistics.stdev(logs) / math.sqrt(len(logs)), len(logs) - 1)


def _around(middle: float, error: float, freedom: float) -> dict[str, float | None]:
    half = student(max(1, int(min(freedom, 1e6)))) * error
    return {"ratio": math.exp(middle), "low": math.exp(middle - half), "high": math.exp(middle + half)}


def acceptance(blocks: Sequence[Block], draft_tokens: int) -> dict[str, Any]:
    """The *acceptance* of all requests, looping answers apart."""
    walks = [(request.ids, request.tally) for block in blocks for request in block.requests if request.tally]
    return pooled(walks, draft_tokens) if walks else summary(Tally(draft_tokens), Tally(draft_tokens))


def round_seconds(blocks: Sequence[Block]) -> float | None:
    """Seconds of one verify round of one request, its prefill left out; None where nothing was drafted."""
    rounds = sum(block.rounds for block in blocks)
    spent = sum(request.seconds - request.first for block in blocks for request in block.requests if request.tally)
    return spent / rounds if rounds else None


def token_seconds(blocks: Sequence[Block]) -> float | None:
    """Seconds of one token of one request, its prefill left out; None where no answer has two tokens."""
    tokens = sum(len(request.ids) - 1 for block in blocks for request in block.requests if len(request.ids) > 1)
    spent = sum(request.seconds - request.first for block in blocks for request in block.requests)
    return spent / tokens if tokens else None


def row(workload: str, load: Load, plain: Sequence[Block], draft: Sequence[Block]) -> dict[str, Any]:
    """A bench row of docs/seams.md from the blocks of both servers."""
    assert load.draft_tokens is not None
    return {
        "workload": workload,
        "concurrency": load.concurrency,
        "temperature": load.temperature,
        "draft_tokens": load.draft_tokens,
        "plain": figures(plain),
        "draft": figures(draft),
        "ratio": ratio(plain, draft),
        "acceptance": acceptance(draft, load.draft_tokens),
        "round_seconds": round_seconds(draft),
        "token_seconds": token_seconds(plain),
    }
