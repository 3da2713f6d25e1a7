"""Doctor's examination of one server: captures that are known to go wrong somewhere, each compared with another."""

import random
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import replace

import torch

from eyas.engines.sglang import capturefile, client
from eyas.engines.sglang.checks import Check, Tally, alike, beginning, collect, random_ids, to_sample
from eyas.engines.sglang.client import Reply, Request, ServerDied
from eyas.engines.sglang.info import ServerInfo
from eyas.engines.sglang.plugin.protocol import Wanted
from eyas.engines.sglang.server import Endpoint
from eyas.engines.target import TargetInfo
from eyas.errors import UserError
from eyas.store.shard import Sample

LONGEST = 8192
"""Longer samples are not tried, save for chunk boundaries above: their states take gigabytes."""
SHORT = (1, 2, 127, 128, 129)
RANKS_TOKENS = 129
CROWD = 64
PLAIN = 4
"""Threads that send plain requests meanwhile."""
CHUNKS = "the hooks lose or mix rows between chunks: try another chunked-prefill-size, or -1, in server.args"
CACHE = "a prefix cache answers for captured requests: set disable-radix-cache in server.args"
BATCH = "the hooks mix requests of a batch: report the SGLang version; max-running-requests 1 in server.args avoids it"


def longest(info: ServerInfo) -> int:
    """Tokens of the longest prompt that the server takes and that is tried."""
    chunk = info.chunk or 0
    bound = max(LONGEST, min(2 * chunk, 2 * LONGEST), min(chunk + 1, 4 * LONGEST))
    limits = [info.context_length - 1, info.kv_tokens - 1, bound]
    if info.longest_input is not None:
        limits.append(info.longest_input - 1)
    return max(1, min(limits))


class Examination:
    """What is tried on one server whose plugin and flags are well."""

    def __init__(
        self, endpoint: Endpoint, info: ServerInfo, target: TargetInfo, head: torch.Tensor | None, seconds: float
    ) -> None:
        self._endpoint, self._info, self._target = endpoint, info, target
        self._tally = Tally(target.vocab_size, head)
        self._deadline = time.monotonic() + seconds
        self._speed: float | None = None
        """Prompt tokens a second, of the captures so far."""
        self._prefix = f"doctor-{uuid.uuid4().hex[:12]}-"
        """Of this examination's files: a run may be capturing from the same server."""
        self._skipped: set[str] = set()
        """What there was no time for."""

    def checks(self) -> Iterator[Check]:
        """All of them. Raises ServerDied, and UserError where the server refuses."""
        assert self._endpoint.root is not None
        try:
            yield from self._checks()
        finally:
            client.sweep(self._endpoint.root, self._prefix)

    def _checks(self) -> Iterator[Check]:
        most = longest(self._info)
        short = [n for n in SHORT if n <= most]
        chunk = self._info.chunk
        edges = [n for n in (chunk - 1, chunk, chunk + 1, 2 * chunk) if 1 < n <= most] if chunk else []
        base = random_ids(most, self._target.vocab_size, 0)
        alone = self._alone({f"n{n}": base[:n] for n in sorted({*short, *edges, most})})
        whole = max(alone.values(), key=lambda sample: len(sample.ids), default=None)
        yield self._lengths(f"lengths {', '.join(map(str, short))}", short, alone, whole)
        if chunk is None:
            yield Check("chunk boundaries", None, "this server never cuts prompts into chunks")
        elif not edges:
            yield Check("chunk boundaries", None, f"no prompt of {chunk} tokens fits into context and KV pool")
        else:
            yield self._lengths(f"chunk boundaries {', '.join(map(str, edges))}", edges, alone, whole)
        name = f"the longest, {most} tokens"
        if f"n{most}" in alone:
            yield Check(name, True, f"captured in {most / self._rate():.1f} s")
        elif f"n{most}" in self._skipped:
            yield Check(name, None, f"no time for it at {self._rate():.0f} tokens a second")
        else:
            yield Check(
                name, False, "its capture did not arrive", "lower what eyas asks for, or give the KV pool more room"
            )
        yield self._prefixes(base)
        yield from self._crowd(alone, base)
        yield self._ranks()
        yield from self._tally.checks()

    def _alone(self, prompts: dict[str, list[int]]) -> dict[str, Sample]:
        """Capture prompts one after the other, shortest first, as far as half of the time allows."""
        found: dict[str, Sample] = {}
        for name, ids in sorted(prompts.items(), key=lambda item: len(item[1])):
            if not self._time_for(len(ids)):
                self._skipped.add(name)
                continue
            began = time.monotonic()
            found |= self._collect({name: ids}, 1)
            if len(ids) >= SHORT[-1] or len(ids) == len(prompts):
                self._speed = len(ids) / (time.monotonic() - began)
        return found

    def _collect(self, prompts: dict[str, list[int]], concurrency: int) -> dict[str, Sample]:
        return collect(
            self._endpoint,
            prompts,
            # Without chunks, in which the client reckons how much it sends at once: here it is to be much.
            replace(self._info, chunk=None),
            self._tally,
            concurrency=concurrency,
            vocab_size=self._target.vocab_size,
            prefix=self._prefix,
        )

    def _time_for(self, tokens: int) -> bool:
        """Whether a capture of so many tokens leaves half of the time that is left."""
        left = self._deadline - time.monotonic()
        return left > 0 and tokens / self._rate() < left / 2

    def _rate(self) -> float:
        return self._speed or 100.0

    def _lengths(self, name: str, lengths: list[int], alone: dict[str, Sample], whole: Sample | None) -> Check:
        """Each is the beginning of the longest one: the same rows, however it was cut into chunks."""
        have = [n for n in lengths if f"n{n}" in alone]
        assert whole is not None or not have
        pairs = [(f"length {n}", alone[f"n{n}"], beginning(whole, n)) for n in have if whole is not None]
        found = alike(name, pairs, CHUNKS)
        if left_out := [n for n in lengths if n not in have]:
            return replace(found, detail=f"{found.detail}; {', '.join(map(str, left_out))} not captured")
        return found

    def _prefixes(self, base: list[int]) -> Check:
        """The same prompt twice, and two that part after six tokens: no row comes from a cache."""
        vocab = self._target.vocab_size
        first, second = base[:8], [*base[:6], *random_ids(2, vocab, 9)]
        long = base[: min(128, len(base))]
        found: dict[str, Sample] = {}
        for name, ids in (("a", first), ("b", second), ("a2", first), ("long", long), ("long2", long)):
            found |= self._collect({f"prefix-{name}": ids}, 1)
        if len(found) < 5:
            return Check("shared prefixes", None, f"only {len(found)} of 5 captures arrived")
        a, b, a2, one, two = (found[f"prefix-{name}"] for name in ("a", "b", "a2", "long", "long2"))
        pairs = [("the same 8 tokens", a2, a), ("6 shared tokens", beginning(b, 6), beginning(a, 6))]
        pairs.append((f"the same {len(long)} tokens", two, one))
        if torch.equal(a.last[6:], b.last[6:]):
            return Check("shared prefixes", False, "two prompts that differ gave the same states", CACHE)
        return alike("shared prefixes", pairs, CACHE)

    def _crowd(self, alone: dict[str, Sample], base: list[int]) -> Iterator[Check]:
        """The samples once more, among others up to 64 at once, with plain requests in between."""
        generator = random.Random(0)
        vocab, most = self._target.vocab_size, longest(self._info)
        prompts = {
            f"crowd-{name}": sample.ids.tolist() for name, sample in alone.items() if self._time_for(len(sample.ids))
        }
        tried = list(prompts)
        spare = 0.25 * (self._deadline - time.monotonic()) * self._rate()
        while len(prompts) < CROWD and spare > 0:
            length = min(generator.randint(3, 200), most)
            shared = min(length - 1, generator.choice((0, 0, 40)))
            prompts[f"crowd-{len(prompts)}"] = [*base[:shared], *random_ids(length - shared, vocab, 100 + len(prompts))]
            spare -= length
        if not prompts:
            yield Check(f"alone and among {CROWD}", None, f"no time for it at {self._rate():.0f} tokens a second")
            return
        order = list(prompts)
        generator.shuffle(order)
        with _Plain(self._endpoint.url, vocab) as plain:
            found = self._collect({name: prompts[name] for name in order}, CROWD)
        again = {name: ids for name, ids in prompts.items() if name not in tried and name in found}
        fillers = self._alone(dict(list(again.items())[:8]))
        pairs = [(name, found[name], alone[name.removeprefix("crowd-")]) for name in tried if name in found]
        pairs += [(name, found[name], sample) for name, sample in fillers.items()]
        checked = alike(f"alone and among {len(prompts)}", pairs, BATCH)
        yield replace(checked, detail=f"{checked.detail}; {plain.answered} plain requests in between")
        if plain.errors:
            yield Check("plain requests beside captures", False, plain.errors[0], "look into the server's log")
        else:
            some = True if plain.answered else None
            yield Check("plain requests beside captures", some, f"{plain.answered} answered")

    def _ranks(self) -> Check:
        """Every tensor-parallel rank holds the same states: no partial sums [sglang 28343]."""
        name, root = "tensor-parallel ranks agree", self._endpoint.root
        assert root is not None
        if self._info.tp == 1:
            return Check(name, None, "there is one rank only")
        ids = random_ids(min(RANKS_TOKENS, longest(self._info)), self._target.vocab_size, 7)
        request = Request(Wanted(f"{self._prefix}ranks", len(ids), every_rank=True), ids)
        vocab = self._target.vocab_size
        reply = next(client.capture([self._endpoint], [request], info=self._info, concurrency=1, vocab_size=vocab))
        if not isinstance(reply, Reply):
            return Check(name, False, reply.reason, "look into the server's log")
        samples = []
        for rank in range(self._info.tp):
            path = reply.path.with_name(reply.path.name.replace(".rank0.", f".rank{rank}."))
            samples.append(to_sample(f"rank {rank}", capturefile.read(path, root), reply.token))
            path.unlink(missing_ok=True)
        pairs = [(sample.key, sample, samples[0]) for sample in samples[1:]]
        return alike(
            name, pairs, "states are taken before they are summed over ranks: report the SGLang version and class"
        )


class _Plain:
    """Plain requests from a few threads, for as long as the block lasts."""

    def __init__(self, url: str, vocab_size: int) -> None:
        self._url, self._vocab_size = url, vocab_size
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(PLAIN)]
        self.answered = 0
        self.errors: list[str] = []

    def __enter__(self) -> "_Plain":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, number: int) -> None:
        turn = 0
        while not self._over.is_set():
            turn += 1
            ids = random_ids(5 + 7 * turn % 60, self._vocab_size, 1000 * number + turn)
            sampling = {"temperature": 0, "max_new_tokens": 4}
            try:
                client.generate(self._url, {"input_ids": ids, "sampling_params": sampling}, timeout=120.0)
                self.answered += 1
            except (UserError, ServerDied) as error:
                self.errors.append(str(error))
                return
