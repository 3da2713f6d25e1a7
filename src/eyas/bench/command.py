"""`eyas bench`: the served figures of any running server, with or without a draft, alone or against another one.

Two servers are measured in turns, block by block, the order changing from round to round, so that whatever else the
machine does meets both. Nothing is started, and no run folder is needed.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from eyas.bench import baseline, cost, measure, servers, workloads
from eyas.bench.measure import Block, Load, Prompt
from eyas.bench.servers import Server
from eyas.config import Bench
from eyas.decode.acceptance import Tally
from eyas.decode.replay import pooled
from eyas.engines import target as targets
from eyas.engines import vllm
from eyas.engines.sglang import info
from eyas.engines.sglang.http import Connection, ServerDied
from eyas.engines.target import TargetInfo
from eyas.errors import UserError
from eyas.progress import Progress


@dataclass
class _Side:
    """A server and what was measured of it for one figure."""

    server: Server
    blocks: list[Block] = field(default_factory=list)
    tallies: list[Tally] = field(default_factory=list)
    """Of whole blocks, where the engine counts only so."""


def bench(url: str, against: str | None, target: str | None, config: Bench, progress: Progress) -> dict[str, Any]:
    """Measure the server at `url`, and in turns with it the one at `against`, usually the same target with a draft.

    Returns `{"servers": [{"url", "engine", "model", "draft_tokens"}], "target", "bench": rows, "notes", "seconds"}`. A
    row is that of docs/seams.md, the first server being `plain`; of a single server, `plain` or `draft` is null, as it
    drafts or not. Rows also hold `break_even`, `by_context` (accept length by tokens of prompt), and for greedy answers
    of two servers `lossless` and `answers {prompts, equal, steady}`; steady: the first server gave it each time.

    `target`: the model, for its tokenizer and template; None: where the first server has it from. Raises UserError: no
    server, other models, unusable prompts, a failed request.
    """
    began = time.perf_counter()
    urls = [url] if against is None else [url, against]
    for one in urls:
        Connection(one)  # refuses what is no address
    about = targets.inspect(target or _model(url), progress)
    found = [servers.find(one, about) for one in urls]
    if len(found) == 2 and found[0].draft_tokens is not None:
        raise UserError(
            f"{found[0].url}: serves with a draft, so it is no baseline: give the plain server first and the other one "
            "as --against"
        )
    try:
        rows = _measure(found, about, config, progress)
    except ServerDied as error:
        raise UserError(f"{error}: start it again, or look into its log") from error
    return {
        "servers": [
            {"url": one.url, "engine": one.engine, "model": one.model, "draft_tokens": one.draft_tokens}
            for one in found
        ],
        "target": str(about.folder),
        "bench": rows,
        "notes": [*_crowded(found, config), *_doubts(rows)],
        "seconds": time.perf_counter() - began,
    }


def _model(url: str) -> str:
    """Where a server has its model from."""
    about = vllm.read(url)
    return about.root if about else info.first(url).model_path


def _measure(found: Sequence[Server], target: TargetInfo, config: Bench, progress: Progress) -> list[dict[str, Any]]:
    asked = {}
    for name in config.workloads:
        progress.milestone(f"reading {name}")
        asked[name] = _fitting(name, workloads.prompts(name, config.prompts, target, None, {}), found, config)
        workloads.refuse_random(name, asked[name], target, found[0].logprobs)
    jobs = [
        (workload, heat, concurrency, baseline.few(asked[workload], concurrency))
        for workload, concurrency, heat in baseline.figures(config)
    ]
    progress.total(sum(len(prompts) for *_, prompts in jobs) * config.rounds * len(found), "requests")
    rows = []
    for workload, heat, concurrency, prompts in jobs:
        progress.milestone(f"{workload}: {concurrency} at a time" + (f", temperature {heat:g}" if heat else ""))
        sides = [_Side(server) for server in found]
        load = Load(concurrency, config.max_new_tokens, heat)
        take(sides, prompts, load, config.rounds, progress)
        rows.append(_row(workload, load, sides, {prompt.key: len(prompt.ids) for prompt in prompts}))
    return rows


def _fitting(workload: str, prompts: Sequence[Prompt], found: Sequence[Server], config: Bench) -> list[Prompt]:
    room = min(server.room for server in found)
    kept = [prompt for prompt in prompts if len(prompt.ids) + config.max_new_tokens <= room]
    if not kept:
        raise UserError(
            f"workload {workload}: no prompt leaves room for {config.max_new_tokens} new tokens in the server's {room}"
            ": lower --max-new-tokens, or give it a longer context"
        )
    return kept


def take(sides: Sequence[_Side], prompts: Sequence[Prompt], load: Load, rounds: int, progress: Progress) -> None:
    """Measure `rounds` blocks of each side, in turns, each server warmed up before its first.

    Raises UserError: a request failed, or counts are not these requests'; ServerDied.
    """
    loads = [Load(load.concurrency, load.max_new_tokens, load.temperature, one.server.draft_tokens) for one in sides]
    pairs = list(zip(sides, loads, strict=True))
    for side, own in pairs:
        measure.warm_up(side.server, prompts, own)
    for number in range(rounds):
        for side, own in pairs if number % 2 == 0 else pairs[::-1]:
            before = side.server.counters()
            block = measure.block(side.server, prompts, own, progress)
            side.blocks.append(block)
            if before is not None and (after := side.server.counters()) is not None:
                side.tallies.append(servers.tally(side.server.url, after.since(before), block))


def _row(workload: str, load: Load, sides: Sequence[_Side], lengths: Mapping[str, int]) -> dict[str, Any]:
    plain = next((side for side in sides if side.server.draft_tokens is None), None)
    other = sides[-1] if sides[-1] is not plain else None
    drafted = other if other and other.server.draft_tokens is not None else None
    row: dict[str, Any] = {
        "workload": workload,
        "concurrency": load.concurrency,
        "temperature": load.temperature,
        "draft_tokens": drafted.server.draft_tokens if drafted else None,
        "plain": measure.figures(plain.blocks) if plain else None,
        "draft": measure.figures(other.blocks) if other else None,
        "ratio": measure.ratio(plain.blocks, other.blocks) if plain and other else None,
        "acceptance": None,
        "round_seconds": None,
        "token_seconds": measure.token_seconds(plain.blocks) if plain else None,
    }
    if drafted:
        row |= _drafting(drafted, lengths)
    row["break_even"] = cost.break_even(row)
    if plain and other and load.temperature == 0:
        row |= _equality(plain.blocks, other.blocks)
    return row


def _drafting(side: _Side, lengths: Mapping[str, int]) -> dict[str, Any]:
    """Acceptance and the seconds of a verify round."""
    tokens = side.server.draft_tokens
    assert tokens is not None
    spent = sum(request.seconds - request.first for block in side.blocks for request in block.requests)
    rounds = sum(tally.rounds for tally in side.tallies)
    return {
        "acceptance": servers.acceptance(side.blocks, side.tallies, tokens),
        "round_seconds": spent / rounds if rounds else measure.round_seconds(side.blocks),
        "by_context": by_context(side.blocks, lengths, tokens),
    }


def by_context(blocks: Sequence[Block], lengths: Mapping[str, int], draft_tokens: int) -> list[dict[str, Any]]:
    """The *acceptance* by tokens of the prompt: for powers of two, `least` to `most` tokens; none where the engine does
    not count by request. `lengths`: tokens of each prompt."""
    parts: dict[int, list[tuple[list[int], Tally]]] = {}
    for request in (request for block in blocks for request in block.requests):
        if request.tally is not None:
            parts.setdefault(lengths[request.key].bit_length(), []).append((request.ids, request.tally))
    return [
        {"least": 2 ** (bits - 1), "most": 2**bits - 1, **pooled(walks, draft_tokens)}
        for bits, walks in sorted(parts.items())
    ]


def _equality(plain: Sequence[Block], other: Sequence[Block]) -> dict[str, Any]:
    """Whether two servers answer alike; below float32 see whether one of them always answers alike itself."""
    own, theirs = _answers(plain), _answers(other)
    equal = sum(own[key][0] == theirs[key][0] for key in own)
    steady = sum(all(ids == own[key][0] for ids in own[key]) for key in own)
    return {
        "lossless": equal == len(own),
        "answers": {"prompts": len(own), "equal": equal, "steady": steady},
    }


def _answers(blocks: Sequence[Block]) -> dict[str, list[list[int]]]:
    found: dict[str, list[list[int]]] = {}
    for request in (request for block in blocks for request in block.requests):
        found.setdefault(request.key, []).append(request.ids)
    return found


def _crowded(found: Sequence[Server], config: Bench) -> list[str]:
    """Where requests wait for each other inside a server."""
    most = max(config.concurrencies)
    return [
        f"{server.url} works on {server.most} requests at once at most: of {most} the others wait, which its times to "
        "the first token include."
        for server in found
        if server.most is not None and server.most < most
    ]


def _doubts(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Ratios that no draft can have: a verify step takes at least as long as a plain one."""
    notes = []
    for row in rows:
        accept, low = cost.accept_length(row), (row["ratio"] or {}).get("low")
        if accept is not None and low is not None and low > accept:
            notes.append(
                f"{row['workload']}, {row['concurrency']} at a time: {low:.2f} times as fast is more than an accept "
                f"length of {accept:.2f} can give: the servers differ in more than the draft, or one was disturbed."
            )
    return notes
