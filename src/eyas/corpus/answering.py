"""Who answers: the target in this process, SGLang servers with token ids, or any server that speaks OpenAI's chat API.

Each takes conversations (`Talk`) and gives them back as they are finished, in any order.
"""

import json
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from eyas.corpus.conversation import Rejected
from eyas.corpus.talk import Answer, Talk
from eyas.engines.sglang import client
from eyas.engines.sglang.answers import answer_of
from eyas.engines.sglang.http import Connection
from eyas.engines.sglang.pool import fan_out
from eyas.engines.target import TargetInfo
from eyas.errors import UserError

TIMEOUT = 3600.0
BATCH = 32
LOOK_SECONDS = 10.0


@dataclass(frozen=True)
class Sampling:
    """How answers are sampled. temperature 0: greedily."""

    temperature: float = 0.0
    top_p: float = 1.0
    max_tokens: int = 512


@dataclass(frozen=True)
class Finished:
    """A conversation that is done; `rejected`: why it has no answers, or no more of them."""

    talk: Talk
    rejected: Rejected | None = None


Answerer = Callable[[Iterable[Talk]], Iterator[Finished]]


def by_sglang(urls: Sequence[str], sampling: Sampling, ends: Sequence[int], vocab_size: int, most: int) -> Answerer:
    """Servers of SGLang: ids go there, ids come back. `most`: requests under way at once to each."""

    def answer(connection: Connection, prompt: list[int], talk: Talk) -> Answer:
        asked: dict[str, Any] = {"temperature": sampling.temperature, "top_p": sampling.top_p}
        asked |= {"max_new_tokens": sampling.max_tokens, "stop_token_ids": list(ends)}
        reply = client.ask(connection, {"input_ids": prompt, "sampling_params": asked}, TIMEOUT)
        ids, finish = answer_of(connection.url, reply, ends, vocab_size)
        return Answer(ids, finish)

    return lambda talks: fan_out(urls, talks, _each(answer), concurrency=most)


def by_openai(urls: Sequence[str], sampling: Sampling, kwargs: Mapping[str, Any], most: int) -> Answerer:
    """Servers with /chat/completions below the URL. They render themselves: where they say what ids they were given
    (vLLM's return_token_ids), those must be ours. Raises UserError."""
    name = _served(urls[0])
    variables = {key: value for key, value in kwargs.items() if key != "tools"}

    def answer(connection: Connection, prompt: list[int], talk: Talk) -> Answer:
        body: dict[str, Any] = {
            "model": name,
            "messages": [_spoken(message) for message in talk.messages],
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "max_tokens": sampling.max_tokens,
            "return_token_ids": True,
        }
        if tools := talk.tools or kwargs.get("tools"):
            body["tools"] = tools
        if variables:
            body["chat_template_kwargs"] = variables
        reply = client.retried(connection, lambda: connection.post("/chat/completions", body, TIMEOUT))
        try:
            choice = reply["choices"][0]
            message, finish = choice["message"], str(choice["finish_reason"])
        except (KeyError, IndexError, TypeError) as error:
            raise UserError(f"{connection.url}: the reply to a chat has no choices: is this its /v1?") from error
        _require_same(connection.url, talk, prompt, reply.get("prompt_token_ids", choice.get("prompt_token_ids")))
        ids = choice.get("token_ids")
        reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
        kept = ids if isinstance(ids, list) and ids else None
        return Answer(kept, finish, message.get("content") or "", reasoning)

    return lambda talks: fan_out(urls, talks, _each(answer), concurrency=most)


def in_process(info: TargetInfo, sampling: Sampling) -> Answerer:
    """The target itself, greedily, some conversations at a time. Raises UserError: it cannot be run so."""
    if sampling.temperature:
        raise UserError("in-process answers are greedy: leave --temperature 0, or name a server with --url")

    def answered(talks: Iterable[Talk]) -> Iterator[Finished]:
        import torch

        from eyas.config import Engine
        from eyas.engines.device import pick_device, pick_dtype, use_threads
        from eyas.engines.inprocess.generate import answer
        from eyas.engines.inprocess.target import InProcessTarget
        from eyas.engines.layers import default_layers

        use_threads(Engine())
        device: torch.device = pick_device(Engine())
        target = InProcessTarget(info, default_layers(info.num_layers), pick_dtype("auto", device), device)
        room = target.longest - sampling.max_tokens
        some = iter(talks)
        while batch := list(islice(some, BATCH)):
            while batch:
                asked, left = [], []
                for talk in batch:
                    try:
                        prompt = talk.ask()
                    except Rejected as reason:
                        yield Finished(talk, reason)
                        continue
                    if prompt is None or len(prompt) > room:
                        yield Finished(talk, None if prompt is None else Rejected(NO_ROOM, f"{len(prompt)} tokens"))
                    else:
                        asked.append(prompt)
                        left.append(talk)
                for talk, row in zip(left, answer(target, asked, sampling.max_tokens) if asked else [], strict=True):
                    ids = row.ids[row.prompt :]
                    talk.give(Answer(ids, "stop" if ids[-1] in info.eos_token_ids else "length"))
                batch = left

    return answered


NO_ROOM = "no room for an answer in the target's context"


def _each(
    answer: Callable[[Connection, list[int], Talk], Answer],
) -> Callable[[Connection, int, Talk], Finished]:
    """One conversation from its first question to its last, over one connection."""

    def work(connection: Connection, server: int, talk: Talk) -> Finished:
        try:
            while (prompt := talk.ask()) is not None:
                talk.give(answer(connection, prompt, talk))
        except Rejected as reason:
            return Finished(talk, reason)
        return Finished(talk)

    return work


def _served(url: str) -> str:
    """The name under which a server has its model."""
    try:
        with urllib.request.urlopen(f"{url.rstrip('/')}/models", timeout=LOOK_SECONDS) as reply:
            return str(json.load(reply)["data"][0]["id"])
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise UserError(
            f"{url}/models: names no model ({error}); give the URL with its /v1, of a running server"
        ) from error


def _spoken(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as the API has it: arguments of tool calls are text there."""
    spoken = dict(message)
    if calls := message.get("tool_calls"):
        spoken["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
            for call in calls
        ]
    return spoken


def _require_same(url: str, talk: Talk, ours: list[int], theirs: Any) -> None:
    """Raises UserError: the server was given other ids than its template and tokenizer give here."""
    if not isinstance(theirs, list) or theirs == ours:
        return
    at = next((i for i, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), None)
    at = min(len(ours), len(theirs)) if at is None else at
    there, here = (ids[at] if at < len(ids) else "missing" for ids in (theirs, ours))
    raise UserError(
        f"{url}: renders {talk.source} otherwise than the tokenizer here: token {at} is {there} there, {here} here; "
        "give the server's template with --chat-template, and its variables with --chat-template-kwargs"
    )
