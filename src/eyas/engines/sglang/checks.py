"""What doctor and twin have in common: captures taken from a server and looked at, and the rows of their table."""

import random
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from eyas.capture import proofs
from eyas.engines.sglang import capturefile, client
from eyas.engines.sglang.client import Lost, Request
from eyas.engines.sglang.info import ServerInfo
from eyas.engines.sglang.plugin.protocol import Wanted, status_file
from eyas.engines.sglang.server import Endpoint
from eyas.errors import UserError
from eyas.files import read_json
from eyas.store.shard import Sample

SPARE_IDS = 16
"""The last ids of a vocabulary are often special ones, such as placeholders of pictures: none of them is sent."""


@dataclass(frozen=True)
class Check:
    """One row of the table."""

    name: str
    passed: bool | None
    """None: not tried."""
    detail: str
    remedy: str = ""

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return asdict(self)


def random_ids(count: int, vocab_size: int, seed: int) -> list[int]:
    """Token ids inside the vocabulary, the same for the same seed: those of a smaller count are their beginning."""
    generator = random.Random(seed)
    return [generator.randrange(1, max(2, vocab_size - SPARE_IDS)) for _ in range(count)]


class Tally:
    """The cheap proofs of every capture: it fails with the first reason of each.

    `head` [V, H]: the target's lm_head; None: not known, so nothing is said of greedy tokens.
    """

    def __init__(self, vocab_size: int, head: torch.Tensor | None) -> None:
        self._vocab_size, self._head = vocab_size, head
        self._seen = 0
        self._reasons: dict[str, list[str]] = {"arrived": [], "ids": [], "finite": [], "constant": [], "greedy": []}

    def look(self, sample: Sample, sent: list[int]) -> None:
        """Prove one capture."""
        self._seen += 1
        found = {
            "ids": None if sample.ids.tolist() == sent else "the forward pass saw other ids than were sent",
            "finite": proofs.finite(sample),
            "constant": proofs.constant(sample),
            "greedy": proofs.greedy(sample, self._head)[0] if self._head is not None else None,
        }
        for name, reason in found.items():
            if reason:
                self._reasons[name].append(f"{sample.key}: {reason}")

    def lost(self, key: str, reason: str) -> None:
        """A capture that did not come about."""
        self._reasons["arrived"].append(f"{key}: {reason}")

    def checks(self) -> Iterator[Check]:
        """A row for each proof."""
        rows = {
            "arrived": (
                "every capture arrived",
                "look into the server's log; start it with the flags that eyas init names",
            ),
            "ids": ("ids echoed", "another program in the server changes prompts: start it without"),
            "finite": ("states are finite", "the server computes NaN: try another attention backend or dtype"),
            "constant": ("states are not constant", "the hooks do not fit this server: report its version and class"),
            "greedy": (
                "head(last) is the server's token",
                "the last state is not the one before the head: is target.model the model that is served?",
            ),
        }
        for name, (title, remedy) in rows.items():
            reasons = self._reasons[name]
            if reasons:
                more = f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else ""
                yield Check(title, False, reasons[0] + more, remedy)
            elif not self._seen:
                yield Check(title, None, "nothing was captured")
            elif name == "greedy" and self._head is None:
                yield Check(title, None, "the target's head cannot be read from here")
            else:
                yield Check(title, True, f"{self._seen} captures")


def collect(
    endpoint: Endpoint,
    prompts: Mapping[str, list[int]],
    info: ServerInfo,
    tally: Tally,
    *,
    concurrency: int,
    vocab_size: int,
    prefix: str = "",
) -> dict[str, Sample]:
    """Capture `prompts` (name to ids), prove each, delete the files; what came back, by name.

    `prefix`: of the names of requests and files, where the server may have others. The layers that a file names have to
    be those that the plugin says, if it does. Raises UserError, ServerDied.
    """
    assert endpoint.root is not None
    requests = [Request(Wanted(prefix + name, len(ids)), ids) for name, ids in prompts.items()]
    layers = _layers(endpoint)
    found = {}
    for reply in client.capture([endpoint], requests, info=info, concurrency=concurrency, vocab_size=vocab_size):
        name = reply.request.wanted.name.removeprefix(prefix)
        if isinstance(reply, Lost):
            tally.lost(name, reply.reason)
            continue
        captured = capturefile.read(reply.path, endpoint.root)
        reply.path.unlink(missing_ok=True)
        if layers is not None and captured.layers != layers:
            tally.lost(name, f"captured were the hidden_states {list(captured.layers)}, not {list(layers)}")
            continue
        found[name] = to_sample(name, captured, reply.token)
        tally.look(found[name], reply.request.ids)
    return found


def _layers(endpoint: Endpoint) -> tuple[int, ...] | None:
    try:
        said = read_json(status_file(endpoint.status, 0)) if endpoint.status is not None else {}
        return tuple(said["layers"])
    except (OSError, UserError, KeyError, TypeError):
        return None


def to_sample(key: str, captured: capturefile.Captured, token: int) -> Sample:
    """A capture as the proofs want it: only the greedy choice after its end is known."""
    argmax = torch.full((len(captured.ids),), -1)
    argmax[-1] = token
    answer = torch.zeros(len(captured.ids), dtype=torch.bool)
    return Sample(key, captured.ids, answer, captured.aux, captured.last, argmax)


def beginning(sample: Sample, tokens: int) -> Sample:
    """The first `tokens` rows of a sample: causal attention makes them a sample of their own."""
    cut = slice(0, tokens)
    argmax = torch.full((tokens,), -1)
    return Sample(sample.key, sample.ids[cut], sample.answer[cut], sample.aux[cut], sample.last[cut], argmax)


def alike(name: str, pairs: list[tuple[str, Sample, Sample]], remedy: str) -> Check:
    """Each pair (what it is, one capture, another of the same ids) agrees within the tolerance of a second capture."""
    if not pairs:
        return Check(name, None, "not tried: nothing was captured, or there was no time")
    worst = 0.0
    for what, one, other in pairs:
        if not torch.equal(one.ids, other.ids):
            return Check(name, False, f"{what}: the forward pass saw other ids", remedy)
        reason, error = proofs.recaptured(one, other)
        if reason:
            return Check(name, False, f"{what}: {reason}", remedy)
        worst = max(worst, error)
    return Check(name, True, f"{len(pairs)} compared, largest relative error {worst:.1e}")
