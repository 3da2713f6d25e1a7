"""Running servers as `eyas bench` sees them: SGLang and vLLM behind one face, with or without a draft."""

from collections.abc import Sequence
from typing import Any, Protocol

from eyas.bench import measure
from eyas.bench.measure import Asker, Block, Load, Prompt, Request
from eyas.corpus.repeats import loops
from eyas.decode.acceptance import Tally, summary
from eyas.engines import vllm
from eyas.engines.sglang import client, info
from eyas.engines.sglang.answers import room
from eyas.engines.sglang.http import Connection
from eyas.engines.target import TargetInfo
from eyas.errors import UserError


class Server(Asker, Protocol):
    """A running server."""

    @property
    def engine(self) -> str:
        """With its version."""

    @property
    def model(self) -> str:
        """What it loaded: a folder or a name."""

    @property
    def draft_tokens(self) -> int | None:
        """Drafted in each step; None: it serves without a draft."""

    @property
    def room(self) -> int:
        """Most tokens of a prompt and its answer."""

    @property
    def most(self) -> int | None:
        """Requests that it works on at once, where it says."""

    def logprobs(self, ids: list[int]) -> list[float]:
        """Of all ids but the first, under the target. Raises UserError, ServerDied."""
        ...

    def counters(self) -> vllm.Counters | None:
        """Cumulative counts, where acceptance comes from them and not from each reply. Raises UserError."""
        ...


class SGLang(measure.SGLang):
    """An SGLang server."""

    def __init__(self, url: str, target: TargetInfo) -> None:
        """Raises UserError: not SGLang, does not answer, or serves another vocabulary than the target's."""
        super().__init__(url, target.eos_token_ids, target.vocab_size)
        about = info.first(url)
        if about.vocab_size not in (None, target.vocab_size):
            raise UserError(
                f"{url}: serves {about.model_path} with a vocabulary of {about.vocab_size} tokens, the target has "
                f"{target.vocab_size}: give its model as --target"
            )
        self.engine, self.model, self.most = f"SGLang {about.version}", about.model_path, about.max_running
        self.room = room(about)
        self.draft_tokens = _drafted(url, about.speculative) if about.speculative else None

    def counters(self) -> None:
        """Each reply has its own counts."""


def _drafted(url: str, algorithm: str) -> int:
    """Tokens that an SGLang server drafts in a step. Raises UserError: it does not say."""
    said: dict[str, Any] = {}
    for path in ("/server_info", "/get_server_info"):
        try:
            said = info.ask(url, path)
            break
        except (OSError, ValueError):
            continue
    if steps := said.get("speculative_num_steps"):
        return int(steps)
    if total := said.get("speculative_num_draft_tokens"):
        return int(total) - 1
    raise UserError(f"{url}: drafts ({algorithm}), but does not say how many tokens a step: update SGLang")


class VLLM:
    """A vLLM server. Its acceptance comes from counters of all requests, so nobody else may use it meanwhile.

    Requests carry no seed: a seeded request is sampled by another code path than those that are served.
    """

    most = None

    def __init__(self, url: str, about: vllm.About, target: TargetInfo) -> None:
        self.url, self._about, self._eos, self._vocab_size = url, about, target.eos_token_ids, target.vocab_size
        self.engine, self.model, self.room = f"vLLM {about.version}", about.root, about.context_length
        counted = vllm.counters(url)
        self.draft_tokens = len(counted.by_position) if counted else None

    def ask(self, connection: Connection, prompt: Prompt, load: Load) -> Request:
        """See Asker. The tally is None: only whole blocks are counted."""
        found = vllm.complete(
            connection, self._about.model, prompt.ids, load.max_new_tokens, load.temperature, self._eos
        )
        client.check_ids(found.ids, self._vocab_size, f"an answer of {self.url}")
        gaps = measure.gaps_of(found.times, found.counts)
        return Request(prompt.key, found.ids, found.times[-1], found.times[0], gaps, None, True)

    def logprobs(self, ids: list[int]) -> list[float]:
        """See Server."""
        connection = Connection(self.url)
        try:
            return vllm.prompt_logprobs(connection, self._about.model, ids)
        finally:
            connection.close()

    def counters(self) -> vllm.Counters | None:
        """See Server."""
        return vllm.counters(self.url)


def find(url: str, target: TargetInfo) -> Server:
    """The server at an address. Raises UserError: none answers, or neither SGLang nor vLLM does."""
    url = url.rstrip("/")
    about = vllm.read(url)
    return SGLang(url, target) if about is None else VLLM(url, about, target)


def acceptance(blocks: Sequence[Block], tallies: Sequence[Tally], draft_tokens: int) -> dict[str, Any]:
    """The *acceptance* of blocks: of their requests, or of `tallies` of whole blocks where the engine counts only so.

    Then looping answers cannot be told apart; `looping_included` says how many there are.
    """
    if not tallies:
        return measure.acceptance(blocks, draft_tokens)
    pooled = Tally(draft_tokens)
    for tally in tallies:
        pooled.add(tally)
    looping = sum(loops(request.ids) for block in blocks for request in block.requests)
    return summary(pooled, Tally(draft_tokens)) | {"looping_included": looping}


def tally(url: str, counted: vllm.Counters, block: Block) -> Tally:
    """What a vLLM server counted during a block.

    vLLM counts drafts behind an answer's end too, at most all of its last step. Raises UserError: more is counted than
    these answers can explain, or the counts contradict each other.
    """
    requests, length = len(block.requests), len(counted.by_position)
    if counted.accepted != sum(counted.by_position):
        raise UserError(f"{url}: accepted {counted.accepted} drafts, by position {counted.by_position}: update vLLM")
    overshot = requests + counted.drafts + counted.accepted - block.tokens
    if overshot > requests * length:
        raise UserError(
            f"{url}: counted {counted.drafts} verify steps that accepted {counted.accepted} drafts, too many for "
            f"{requests} answers of {block.tokens} tokens: somebody else uses this server; measure it alone"
        )
    reached = [counted.drafts, *counted.by_position][:length]
    return Tally(length, counted.drafts, reached, list(counted.by_position), requests)
