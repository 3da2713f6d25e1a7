"""What a draft is worth as its target gets dearer: speed-up by cost and concurrency, measured and predicted.

    python benchmarks/speedup.py --name h200 --draft DIR [--times 1,10] [--concurrency 1,4,16] [FLAG=VALUE]...

The target is SmolLM2-135M, and the same model made dear by layers that change no token (eyas.engines.dear). DIR is a
draft of it (benchmarks/draft.py). For each cost three servers are up at once and are asked in turns: without a draft,
with the draft, with a random one. The prediction uses none of the drafted server's times: accept length from replay of
the plain server's answers, costs of a round and a prefill from the random draft's server, the rest from the plain one.
The first concurrency has to be 1: its time to the first token is that cost of a prefill.
"""

import argparse
import contextlib
import datetime
import json
import math
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import yaml
from draft import capture, read

from eyas.bench import measure, workloads
from eyas.bench.measure import Block, Load, Prompt
from eyas.config import Engine, Server
from eyas.decode.replay import load_draft, pooled, spread, tallies
from eyas.draft import checkpoint, start
from eyas.engines import dear, weights
from eyas.engines import target as targets
from eyas.engines.device import pick_device
from eyas.engines.inprocess.target import InProcessTarget
from eyas.engines.sglang.command import Draft
from eyas.engines.sglang.server import Running, started
from eyas.errors import UserError
from eyas.progress import Silent

KINDS = ("plain", "draft", "random")


def random_draft(folder: Path, info: targets.TargetInfo, out: Path) -> Path:
    """A draft of the same shape, vocabulary and layers as the one in `folder`, with random weights."""
    config = checkpoint.read_config(folder)
    draft = load_draft(folder, info, torch.float32, torch.device("cpu"))
    generator = torch.Generator().manual_seed(1)
    head = weights.head(info.folder)[draft.target_ids].float()
    start.random(draft, head[torch.randperm(len(head), generator=generator)], torch.ones(head.shape[1]), generator)
    out.mkdir(parents=True, exist_ok=True)
    names = ("eagle_config", "eagle_aux_hidden_state_layer_ids")
    checkpoint.save(out, draft, torch.bfloat16, {name: config[name] for name in names if name in config})
    return out


def turns(rounds: list[int], concurrency: int) -> tuple[int, int]:
    """What a server does for requests of so many `rounds`, asked `concurrency` at a time: prefills, rounds of a batch.

    All that wait are prefilled together and hold up the others meanwhile; then all have a round at once.
    """
    waiting, running = list(reversed(rounds)), list[int]()
    prefills = batches = 0
    while waiting or running:
        if waiting and len(running) < concurrency:
            while waiting and len(running) < concurrency:
                running.append(waiting.pop())
            prefills += 1
        else:
            batches += 1
            running = [left - 1 for left in running]
        running = [left for left in running if left > 0]
    return prefills, batches


def predicted(plain: list[Block], costs: list[Block], rounds: dict[str, int], prefill: float) -> float:
    """The speed-up of whole requests, first token included, from the random draft's costs and the replayed `rounds`.

    `prefill`: seconds to the first token of one request alone with that server. One request at a time: the geometric
    mean over prompts, as `measure.ratio` takes it. Several: a round's cost is what the random draft's blocks leave once
    their prefills are taken off.
    """
    requests = plain[0].requests
    if plain[0].concurrency == 1:
        token, turn = measure.token_seconds(plain), measure.round_seconds(costs)
        assert token is not None and turn is not None, "nothing was decoded"  # noqa: PT018
        first = statistics.mean(request.first for block in plain for request in block.requests)
        one = [first + (len(request.ids) - 1) * token for request in requests]
        other = [prefill + rounds.get(request.key, 0) * turn for request in requests]
        return math.exp(statistics.mean(math.log(a / b) for a, b in zip(one, other, strict=True)))
    counted = [[request.tally.rounds if request.tally else 0 for request in block.requests] for block in costs]
    events = [turns(block, plain[0].concurrency) for block in counted]
    spent = sum(block.seconds for block in costs) - sum(prefills for prefills, _ in events) * prefill
    turn = spent / sum(batches for _, batches in events)
    prefills, batches = turns([rounds.get(request.key, 0) for request in requests], plain[0].concurrency)
    return statistics.mean(block.seconds for block in plain) / (prefills * prefill + batches * turn)


def flops_and_bytes() -> dict[str, float]:
    """Measured operations a second of a bfloat16 product, and bytes a second of a copy on the device, both counted."""
    if not torch.cuda.is_available():
        return {}
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    big = torch.empty(1 << 31, dtype=torch.uint8, device="cuda")
    found = {}
    for name, work, size in (("flops", lambda: a @ a, 2 * 8192**3), ("bytes", lambda: big.clone(), 2 * big.numel())):
        for _ in range(3):
            work()
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(20):
            work()
        torch.cuda.synchronize()
        found[name] = 20 * size / (time.perf_counter() - began)
    return found


def main() -> None:
    """Measure and write benchmarks/results/DATE-speedup-NAME.json."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--name", required=True)
    parser.add_argument("--draft", type=Path, required=True)
    parser.add_argument("--times", default="1,10")
    parser.add_argument("--concurrency", default="1,4,16")
    parser.add_argument("--answers", type=Path, help="take the held-out rows' prompts (benchmarks/draft.py)")
    parser.add_argument("--heldout", type=int, default=300)
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cost-rounds", type=int, default=2, help="of the random draft's server")
    parser.add_argument("--draft-tokens", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--work", type=Path, default=Path("/dev/shm/eyas-speedup"))
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("flags", nargs="*", help="flags of the server as NAME=VALUE")
    asked = parser.parse_args()
    args = {name: yaml.safe_load(value) for name, _, value in (flag.partition("=") for flag in asked.flags)}
    info = targets.inspect("smollm2-135m-instruct", Silent())
    drafts = {"draft": asked.draft, "random": random_draft(asked.draft, info, asked.work / "random")}
    ceilings = flops_and_bytes()
    times = [int(one) for one in asked.times.split(",")]
    models = {n: dear.make(info.folder, asked.work / f"times{n}", n) for n in times}
    layers = tuple(json.loads((asked.draft / "draft.json").read_text())["layers"])
    print("models made", ceilings, flush=True)
    concurrencies = [int(one) for one in asked.concurrency.split(",")]
    rows: list[dict[str, Any]] = []
    cheap: dict[int, float] = {}  # seconds of a token of the first model, by concurrency
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    written = {
        "date": datetime.date.today().isoformat(),
        "commit": commit,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "ceilings": ceilings,
        "what": {"prompts": asked.prompts, "tokens": asked.tokens, "rounds": asked.rounds, "flags": asked.flags,
                 "draft_tokens": asked.draft_tokens, "dtype": asked.dtype},
        "draft": json.loads((asked.draft / "draft.json").read_text()),
        "rows": rows,
    }  # fmt: skip
    asked.out.mkdir(parents=True, exist_ok=True)
    path = asked.out / f"{written['date']}-speedup-{asked.name}.json"

    def serve(stack: contextlib.ExitStack, n: int, kind: str) -> Running:
        config = Server(python=asked.python, args=args)
        draft = Draft(drafts[kind], asked.draft_tokens) if kind in drafts else None
        where = asked.work / f"{kind}{n}"
        return stack.enter_context(started(config, models[n], asked.dtype, where, Silent(), capture=False, draft=draft))

    with contextlib.ExitStack() as stack, ThreadPoolExecutor(8) as pool:
        loading = {(n, kind): pool.submit(serve, stack, n, kind) for n in times for kind in KINDS}
        running = {}
        for which, one in loading.items():
            try:
                running[which] = one.result()
            except UserError as error:
                print(*which, error, flush=True)
        times = [n for n in times if all((n, kind) in running for kind in KINDS)]
        written["server_start_seconds"] = {f"{kind} x{n}": one.seconds["start"] for (n, kind), one in running.items()}
        print("servers ready", written["server_start_seconds"], flush=True)
        device = pick_device(Engine())
        target = InProcessTarget(info, layers, getattr(torch, asked.dtype), device)
        drafter = load_draft(asked.draft, info, torch.float32, device)
        rows_of = read(asked.answers, asked.heldout) if asked.answers else []
        for n in times:
            alone = 0.0  # seconds to the first token of one request alone, with the random draft
            servers = {
                kind: measure.SGLang(running[n, kind].endpoint.url, info.eos_token_ids, info.vocab_size)
                for kind in KINDS
            }
            for concurrency in concurrencies:
                count = max(asked.prompts, 2 * concurrency)
                if rows_of:
                    prompts = [Prompt(str(i), rows_of[i][0][: rows_of[i][1]]) for i in spread(len(rows_of), count)]
                else:
                    prompts = workloads.prompts("heldout", count, info, None, {})
                loads = {
                    kind: Load(concurrency, asked.tokens, 0.0, asked.draft_tokens if kind in drafts else None)
                    for kind in KINDS
                }
                blocks: dict[str, list[Block]] = {kind: [] for kind in KINDS}
                for kind in KINDS:
                    measure.warm_up(servers[kind], prompts, loads[kind])
                for number in range(asked.rounds):
                    for kind in KINDS if number < asked.cost_rounds else KINDS[:2]:
                        blocks[kind].append(measure.block(servers[kind], prompts, loads[kind], Silent()))
                ids = {prompt.key: prompt.ids for prompt in prompts}
                drafted = [r for r in blocks["plain"][0].requests if len(r.ids) > 1]
                samples = capture(target, [(ids[r.key] + r.ids, len(ids[r.key])) for r in drafted], torch.float32)
                walks = list(
                    zip([s.ids[s.answer].tolist() for s in samples], tallies(drafter, samples, asked.draft_tokens),
                        strict=True)
                )  # fmt: skip
                accept = 1 + sum(sum(t.accepted) for _, t in walks) / sum(t.rounds for _, t in walks)
                served = sum(sum(r.tally.accepted) for b in blocks["draft"] for r in b.requests if r.tally)
                found = measure.row("heldout", loads["draft"], blocks["plain"], blocks["draft"])
                pairs = zip(blocks["plain"][0].requests, blocks["draft"][0].requests, strict=True)
                replayed = {r.key: tally.rounds for r, (_, tally) in zip(drafted, walks, strict=True)}
                firsts = [request.first for block in blocks["random"] for request in block.requests]
                alone = alone or statistics.median(firsts)
                guess = predicted(blocks["plain"], blocks["random"], replayed, alone)
                rows.append({
                    "times": n, **found,
                    "cost": found["token_seconds"] / cheap.setdefault(concurrency, found["token_seconds"]),
                    "random_round_seconds": measure.round_seconds(blocks["random"]),
                    "accept_length": {"served": 1 + served / sum(b.rounds for b in blocks["draft"]),
                                      "replayed": accept, "without_looping": pooled(walks, asked.draft_tokens)},
                    "predicted": guess, "off": guess / found["ratio"]["ratio"] - 1,
                    "equal_answers": sum(a.ids == b.ids for a, b in pairs), "answers": len(prompts),
                })  # fmt: skip
                path.write_text(json.dumps(written, indent=1) + "\n")  # after each row, so that no later fault costs it
                said = {key: rows[-1][key] for key in ("times", "cost", "concurrency", "ratio", "predicted", "off")}
                print(json.dumps({**said, "accept_length": rows[-1]["accept_length"]["served"]}), flush=True)
    print(path)


if __name__ == "__main__":
    main()
