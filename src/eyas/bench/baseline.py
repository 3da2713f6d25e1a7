"""The baseline step of an SGLang run: the target without a draft, at every concurrency, temperature and workload asked.

It leases the same server that answered and captured, so that the target is loaded once. The decode step measures the
same prompts with the draft, the `again` step measures the plain server once more after it. All take per-request
figures, so health checks and warm-up shift nothing.
"""

from collections.abc import Iterator, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from eyas.bench import measure, workloads
from eyas.bench.measure import Block, Load, Prompt
from eyas.config import Bench, Decode, Prompts, Target
from eyas.engines import target as targets
from eyas.engines.sglang import client, info
from eyas.engines.sglang.server import endpoints
from eyas.engines.target import TargetInfo
from eyas.files import read_json, write_json
from eyas.progress import Progress
from eyas.spec import StepSpec
from eyas.store.store import FeatureStore

PLAIN, DRAFTED = "plain", "drafted"
Figure = tuple[str, int, float]
"""Workload, concurrency, temperature."""


def run(spec: StepSpec, out: Path, progress: Progress) -> dict[str, Any]:
    """Step entry; leases `server`. Writes plain-*.json, a file for each figure."""
    target = targets.read(spec.inputs["target"])
    store = FeatureStore.open(spec.inputs["capture"] / "heldout", target=target)
    url = endpoints(spec.services["server"])[0].url
    with client.leased():
        about = info.read(url)
        found = take(url, spec, store, target, None, out, progress)
    return {
        "figures": [
            {"workload": workload, "concurrency": concurrency, "temperature": heat, **measure.figures(blocks)}
            for (workload, concurrency, heat), blocks in found.items()
        ],
        "versions": {"sglang": about.version},
    }


def take(
    url: str,
    spec: StepSpec,
    store: FeatureStore,
    target: TargetInfo,
    draft_tokens: int | None,
    out: Path,
    progress: Progress,
) -> dict[Figure, list[Block]]:
    """Measure every figure that the run file asks for; what an earlier attempt wrote into `out` is kept."""
    config = spec.section(Bench)
    server = measure.SGLang(url, target.eos_token_ids, target.vocab_size)
    prefix = PLAIN if draft_tokens is None else DRAFTED
    kwargs = spec.section(Target).chat_template_kwargs
    heldout = spec.section(Prompts).heldout
    asked = {name: workloads.prompts(name, config.prompts, target, store, kwargs, heldout) for name in config.workloads}
    if draft_tokens is None:
        for name, prompts in asked.items():
            workloads.refuse_random(name, prompts, target, server.logprobs)
    wanted = list(figures(config))
    there = read_blocks(out, prefix)
    # Several requests at a time need more prompts than few, or the last ones run alone.
    jobs = [
        (figure, few(asked[figure[0]], figure[1]), Load(figure[1], config.max_new_tokens, figure[2], draft_tokens))
        for figure in wanted
        if figure not in there
    ]
    progress.total(sum(len(prompts) for _, prompts, _ in jobs) * config.rounds, "requests")
    for (workload, concurrency, heat), prompts, load in jobs:
        progress.milestone(f"{workload}: {concurrency} at a time" + (f", temperature {heat:g}" if heat else ""))
        measure.warm_up(server, prompts, load)
        blocks = [measure.block(server, prompts, load, progress) for _ in range(config.rounds)]
        said = {"workload": workload, "concurrency": concurrency, "temperature": heat}
        path = out / f"{prefix}-{wanted.index((workload, concurrency, heat)):03}.json"
        write_json(path, {**said, "blocks": [block.to_json() for block in blocks]})
    found = read_blocks(out, prefix)
    return {figure: found[figure] for figure in wanted}


def figures(config: Bench) -> Iterator[Figure]:
    """What is to be measured."""
    for workload in config.workloads:
        for heat in config.temperatures:
            for concurrency in config.concurrencies:
                yield workload, concurrency, heat


def few(prompts: Sequence[Prompt], concurrency: int) -> list[Prompt]:
    """As many prompts as keep `concurrency` requests busy; where there are fewer, they come again."""
    return list(islice(cycle(prompts), max(len(prompts), 2 * concurrency)))


def read_blocks(folder: Path, prefix: str = PLAIN) -> dict[Figure, list[Block]]:
    """The blocks that `take` wrote, of the plain or of the drafted server."""
    found = {}
    for path in sorted(folder.glob(f"{prefix}-*.json")):
        said = read_json(path)
        figure = said["workload"], said["concurrency"], said["temperature"]
        found[figure] = [Block.from_json(block) for block in said["blocks"]]
    return found


def rows(plain: dict[Figure, list[Block]], drafted: dict[Figure, list[Block]], config: Decode) -> list[dict[str, Any]]:
    """The bench rows of both servers."""
    return [
        measure.row(workload, Load(concurrency, 0, heat, config.draft_tokens), plain[figure], blocks)
        for figure, blocks in drafted.items()
        for workload, concurrency, heat in [figure]
        if figure in plain
    ]
