"""The baseline step of an SGLang run: some held-out prompts answered without a draft, one request at a time, and timed.

It leases the same server that answered and captured, so that the target is loaded once. The decode step times the same
prompts with the draft; both take per-request figures only, so health checks and warm-up shift nothing.
"""

import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eyas.config import Answers, Decode
from eyas.decode.replay import answer_length, spread
from eyas.engines import target as targets
from eyas.engines.sglang import client, info
from eyas.engines.sglang.answers import answer_of, body
from eyas.engines.sglang.http import Connection
from eyas.engines.sglang.server import endpoints
from eyas.files import read_json, write_json
from eyas.progress import Progress
from eyas.spec import StepSpec
from eyas.store.shard import Sample
from eyas.store.store import FeatureStore

FILE = "baseline.json"
WARM_UP_TOKENS = 4


def run(spec: StepSpec, out: Path, progress: Progress) -> dict[str, Any]:
    """Step entry; leases `server`. Writes baseline.json: a row of the held-out store (`prompt`), `ids`, `seconds`."""
    target = targets.read(spec.inputs["target"])
    store = FeatureStore.open(spec.inputs["capture"] / "heldout", target=target)
    end = endpoints(spec.services["server"])[0]
    with client.leased():
        about = info.read(end.url)
        timing = time_rows(end.url, spec, store, target.eos_token_ids, progress)
    write_json(out / FILE, timing)
    tokens, seconds = sum(len(row["ids"]) for row in timing), sum(row["seconds"] for row in timing)
    return {
        "prompts": len(timing),
        "tokens": tokens,
        "seconds": round(seconds, 3),
        "tokens_per_second": round(tokens / seconds, 2),
        "versions": {"sglang": about.version},
    }


def read(folder: Path) -> list[dict[str, Any]]:
    """What the step wrote."""
    timing: list[dict[str, Any]] = read_json(folder / FILE)
    return timing


def time_rows(
    url: str, spec: StepSpec, store: FeatureStore, eos: Sequence[int], progress: Progress
) -> list[dict[str, Any]]:
    """Answer the rows that are to be timed, one after another, whatever the server serves with."""
    config, answers = spec.section(Decode), spec.section(Answers)
    longest = min(answers.heldout_max_new_tokens or answers.max_new_tokens, config.timing_tokens)
    rows = spread(len(store), config.timing_prompts)
    progress.milestone("timing one request at a time")
    progress.total(len(rows), "prompts")
    connection, timing = Connection(url), []
    # The first request on a connection, and the first of a server, pay for what is set up once.
    client.ask(connection, _alone(prompt_of(store.sample(rows[0])), WARM_UP_TOKENS, eos))
    for row in rows:
        asked = _alone(prompt_of(store.sample(row)), longest, eos)
        began = time.perf_counter()
        reply = client.ask(connection, asked)
        seconds = time.perf_counter() - began
        ids, _ = answer_of(url, reply, eos, store.contract.vocab_size)
        timing.append({"prompt": row, "ids": ids, "seconds": seconds})
        progress.advance(1)
    connection.close()
    return timing


def prompt_of(sample: Sample) -> list[int]:
    """The ids before the sample's answer."""
    ids: list[int] = sample.ids[: len(sample.ids) - answer_length(sample)].tolist()
    return ids


def _alone(prompt: list[int], longest: int, eos: Sequence[int]) -> dict[str, Any]:
    """A request that computes its whole prompt, whatever came before it."""
    return {**body(prompt, longest, eos), "extra_key": uuid.uuid4().hex}
