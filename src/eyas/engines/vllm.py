"""Asks a vLLM server: answers token ids in and out, log-probabilities of a prompt, and its counts of drafts.

Its OpenAI-compatible API with vLLM's own fields: `return_token_ids`, and `cache_salt`, so that nothing comes out of the
prefix cache. Stands between `eyas bench` and the server.
"""

import http.client
import re
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from eyas.engines.sglang import info
from eyas.engines.sglang.http import Connection
from eyas.errors import UserError

PATH = "/v1/completions"
SAMPLE = re.compile(r"^vllm:spec_decode_(\w+?)_total(?:\{(.*)\})? (\S+)$", re.MULTILINE)
POSITION = re.compile(r'position="(\d+)"')
SETTLE_SECONDS, SETTLE_TRIES = 0.1, 50
NEUTRAL = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
"""Else the server takes the model's generation_config.json, which SGLang's /generate does not."""
# A proxy of the environment does not stand between us and a server that a user named.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True)
class About:
    """What the server says of itself."""

    version: str
    model: str
    """The name by which it is asked."""
    root: str
    """What it loaded: a folder or a name."""
    context_length: int


@dataclass(frozen=True)
class Answer:
    """One answer: its ids, the end token included, and for each piece seconds since it was asked and tokens by then."""

    ids: list[int]
    times: list[float]
    counts: list[int]


@dataclass(frozen=True)
class Counters:
    """Cumulative counts of all requests since the server began."""

    drafts: int
    """Verify steps."""
    accepted: int
    by_position: tuple[int, ...]
    """Accepted drafts, by position: as many as the server drafts in a step."""

    def since(self, earlier: "Counters") -> "Counters":
        """What came in between. Raises UserError: counts went back, so the server was started anew."""
        pairs = list(zip(self.by_position, earlier.by_position, strict=False))
        parts = [self.drafts - earlier.drafts, self.accepted - earlier.accepted, *(now - then for now, then in pairs)]
        if min(parts) < 0 or len(self.by_position) != len(earlier.by_position):
            raise UserError("the server's counts of drafts went back: it was started anew while it was measured")
        return Counters(parts[0], parts[1], tuple(parts[2:]))


def read(url: str) -> About | None:
    """What a vLLM server says of itself; None: something else answers, or nothing does."""
    try:
        listed = info.ask(url, "/v1/models")["data"][0]
        if listed.get("owned_by") != "vllm":
            return None
        version = info.ask(url, "/version")["version"]
        return About(str(version), listed["id"], str(listed.get("root") or listed["id"]), int(listed["max_model_len"]))
    except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError, AttributeError):
        return None


def counters(url: str) -> Counters | None:
    """The counts of drafts as /metrics gives them, over all engines; None: the server drafts nothing.

    Waits until two readings agree, since counts arrive a moment after an answer. Raises UserError: they never do, or
    the server gives none.
    """
    before = _counters(url)
    for _ in range(SETTLE_TRIES):
        if before is None:
            return None
        time.sleep(SETTLE_SECONDS)
        now = _counters(url)
        if now == before:
            return now
        before = now
    raise UserError(f"{url}: its counts do not come to rest: somebody else uses this server; measure it alone")


def _counters(url: str) -> Counters | None:
    try:
        with _OPENER.open(url.rstrip("/") + "/metrics", timeout=30.0) as answer:
            text = answer.read().decode("utf-8", "replace")
    except (OSError, http.client.HTTPException) as error:
        raise UserError(f"{url}/metrics: cannot be read ({error}): start the server with its metrics") from error
    return parse(text)


def parse(text: str) -> Counters | None:
    """The counts in the text of /metrics, summed over engines; None: there are none."""
    totals: dict[str, int] = {}
    positions: dict[int, int] = {}
    for name, labels, value in SAMPLE.findall(text):
        if name == "num_accepted_tokens_per_pos":
            if place := POSITION.search(labels):
                positions[int(place[1])] = positions.get(int(place[1]), 0) + int(float(value))
        else:
            totals[name] = totals.get(name, 0) + int(float(value))
    if "num_drafts" not in totals or not positions:
        return None
    by_position = tuple(positions.get(place, 0) for place in range(max(positions) + 1))
    return Counters(totals["num_drafts"], totals.get("num_accepted_tokens", 0), by_position)


def complete(
    connection: Connection, model: str, ids: Sequence[int], longest: int, temperature: float, eos: Sequence[int]
) -> Answer:
    """One answer of up to `longest` tokens, streamed. Raises UserError: refused, or no ids; Transient, ServerDied."""
    body = {
        **_body(model, ids, longest),
        **NEUTRAL,
        "temperature": temperature,
        "stop_token_ids": list(eos),
        "return_token_ids": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    url, said, times, counts, usage = connection.url, list[int](), list[float](), list[int](), None
    began = time.perf_counter()
    for event in connection.stream(PATH, body):
        usage = event.get("usage") or usage
        for choice in event.get("choices", []):
            new = choice.get("token_ids")
            if not isinstance(new, list):
                raise UserError(f"{url}: replies lack token_ids: vLLM 0.10.2 or newer is needed")
            said += new
            stop = choice.get("stop_reason")
            if choice.get("finish_reason") == "stop" and isinstance(stop, int) and said[-1:] != [stop]:
                said.append(stop)
            if new:
                times.append(time.perf_counter() - began)
                counts.append(len(said))
    if not said or (usage and usage.get("completion_tokens", len(said)) != len(said)):
        raise UserError(f"{url}: a reply of {len(said)} ids whose usage is {usage}: update vLLM")
    return Answer(said, times, counts)


def prompt_logprobs(connection: Connection, model: str, ids: Sequence[int]) -> list[float]:
    """Log-probabilities of all ids but the first. Raises UserError: refused, or none; Transient, ServerDied."""
    reply = connection.post(PATH, {**_body(model, ids, 1), "temperature": 0.0, "prompt_logprobs": 0})
    try:
        rows: list[Any] = reply["choices"][0]["prompt_logprobs"]
        return [float(row[str(token)]["logprob"]) for token, row in zip(ids[1:], rows[1:], strict=True)]
    except (LookupError, TypeError, ValueError) as error:
        raise UserError(f"{connection.url}: replies lack the prompt's prompt_logprobs: update vLLM") from error


def _body(model: str, ids: Sequence[int], longest: int) -> dict[str, Any]:
    return {"model": model, "prompt": list(ids), "max_tokens": longest, "cache_salt": uuid.uuid4().hex}
