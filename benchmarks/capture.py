"""Prompt tokens a second of an SGLang server with captures, against the same server without the plugin.

    python benchmarks/capture.py --name h200 [--rounds 3] [--samples 200] [--tp 1] [--json] [FLAG=VALUE]...

Both servers are loaded at once and asked in turns, in one run. The target is a random model of Llama-8B's shape, made
in memory-backed storage; samples are random prompts with the server's own greedy answers. "captured" counts all that
the capture step does: states out of the server, proofs, digests, shards; once with everything in memory, once with
shards on disk. `--json` adds what the server's own return of hidden states as JSON does. The floor is the model's
multiplications over the device's measured rate. Needs a GPU, an interpreter with eyas and SGLang, and space for 16 GB.
"""

import argparse
import datetime
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from eyas.capture import preflight
from eyas.capture.flow import Flow, Want
from eyas.capture.proofs import Proofs, recaptured
from eyas.config import Server
from eyas.corpus.keys import sample_key
from eyas.engines.sglang import capturefile, client, info
from eyas.engines.sglang.checks import to_sample
from eyas.engines.sglang.http import Connection
from eyas.engines.sglang.plugin.protocol import Wanted
from eyas.engines.sglang.pool import fan_out
from eyas.engines.sglang.server import Running, started
from eyas.engines.target import TargetInfo
from eyas.progress import Silent

HIDDEN, LAYERS, INNER, VOCAB, HEADS, KEYS, HEAD = 4096, 32, 14336, 128256, 32, 8, 128
ANSWER = 8
TOKEN_BYTES = 4 * HIDDEN * 2


def make_model(folder: Path) -> None:
    """A random model of Llama-8B's shape, as shards of one layer each."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "head_dim": HEAD,
        "intermediate_size": INNER, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "hidden_act": "silu",
        "num_key_value_heads": KEYS, "vocab_size": VOCAB, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "attention_bias": False,
        "mlp_bias": False, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator("cuda").manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator, device="cuda") * 0.02).bfloat16().cpu()

    one = torch.ones(HIDDEN, dtype=torch.bfloat16)
    places: dict[str, str] = {}

    def save(name: str, tensors: dict[str, torch.Tensor]) -> None:
        save_file(tensors, folder / name, metadata={"format": "pt"})
        places.update(dict.fromkeys(tensors, name))

    save("top.safetensors", {
        "model.embed_tokens.weight": random(VOCAB, HIDDEN), "lm_head.weight": random(VOCAB, HIDDEN),
        "model.norm.weight": one.clone(),
    })  # fmt: skip
    for i in range(LAYERS):
        at = f"model.layers.{i}."
        save(f"layer-{i:02}.safetensors", {
            at + "self_attn.q_proj.weight": random(HEADS * HEAD, HIDDEN),
            at + "self_attn.k_proj.weight": random(KEYS * HEAD, HIDDEN),
            at + "self_attn.v_proj.weight": random(KEYS * HEAD, HIDDEN),
            at + "self_attn.o_proj.weight": random(HIDDEN, HEADS * HEAD),
            at + "mlp.gate_proj.weight": random(INNER, HIDDEN), at + "mlp.up_proj.weight": random(INNER, HIDDEN),
            at + "mlp.down_proj.weight": random(HIDDEN, INNER), at + "input_layernorm.weight": one.clone(),
            at + "post_attention_layernorm.weight": one.clone(),
        })  # fmt: skip
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def flops(dtype: torch.dtype = torch.bfloat16, width: int = 8192) -> float:
    """Measured operations a second of a product of square matrices, sustained for some seconds."""
    a, b = (torch.randn(width, width, device="cuda", dtype=dtype) for _ in range(2))
    for _ in range(10):
        a @ b
    torch.cuda.synchronize()
    began, count = time.perf_counter(), 200
    for _ in range(count):
        a @ b
    torch.cuda.synchronize()
    return count * 2 * width**3 / (time.perf_counter() - began)


def copy_rates(folder: Path) -> dict[str, float]:
    """Bytes a second: device to pinned memory, and one thread writing a file in `folder`."""
    device, pinned = (
        torch.empty(1 << 28, dtype=torch.uint8, **where) for where in ({"device": "cuda"}, {"pin_memory": True})
    )
    pinned.copy_(device)
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(10):
        pinned.copy_(device, non_blocking=True)
    torch.cuda.synchronize()
    off = 10 * pinned.nbytes / (time.perf_counter() - began)
    data = memoryview(pinned.numpy())
    began = time.perf_counter()
    with (folder / "rate").open("wb") as file:
        for _ in range(4):
            file.write(data)
        file.flush()
        os.fsync(file.fileno())
    wrote = 4 * pinned.nbytes / (time.perf_counter() - began)
    (folder / "rate").unlink()
    return {"device_to_pinned": off, "file_write": wrote}


def ask(url: str, about: info.ServerInfo, prompts: list[list[int]], new: int, concurrency: int) -> list[list[int]]:
    """Plain requests, as many tokens under way as the capture step keeps: each prompt's new tokens, in order."""
    budget = client.CHUNKS * (about.chunk or client.CHUNK_TOKENS)
    under_way = [0]

    def work(connection: Connection, server: int, job: tuple[int, list[int]]) -> tuple[int, list[int]]:
        body = {
            "input_ids": job[1],
            "extra_key": f"{time.time_ns()}-{job[0]}",
            "sampling_params": {"temperature": 0, "max_new_tokens": new, "ignore_eos": True},
        }
        return job[0], client.ask(connection, body)["output_ids"]

    def admit(server: int, job: tuple[int, list[int]], idle: bool) -> bool:
        if not idle and under_way[0] + len(job[1]) > budget:
            return False
        under_way[0] += len(job[1])
        return True

    def done(server: int, job: tuple[int, list[int]], result: object) -> None:
        under_way[0] -= len(job[1])

    found = fan_out([url], enumerate(prompts), work, concurrency=concurrency, admit=admit, done=done)
    return [tokens for _, tokens in sorted(found)]


def touch(folder: Path, size: int) -> None:
    """Use `size` bytes of memory-backed storage once: a virtual machine is given each page when it is first touched,
    which takes longer than writing to it and happens once in the machine's life."""
    piece = bytes(1 << 26)
    with (folder / "touch").open("wb") as file:
        for _ in range(size // len(piece)):
            file.write(piece)
    (folder / "touch").unlink()


def states(running: Running, about: info.ServerInfo, wants: list[Want]) -> dict[str, Any]:
    """Captured samples by key, kept in memory."""
    assert running.endpoint.root is not None
    requests = [client.Request(Wanted(want.key, len(want.ids)), want.ids) for want in wants]
    found = {}
    replies = client.capture([running.endpoint], requests, info=about, concurrency=8, vocab_size=VOCAB)
    for reply in replies:
        assert isinstance(reply, client.Reply), reply
        captured = capturefile.read(reply.path, running.endpoint.root)
        found[reply.request.wanted.name] = to_sample(reply.request.wanted.name, captured, reply.token)
        reply.path.unlink()
    return found


class Bench:
    """Two servers and the figures of their turns."""

    def __init__(self, plain: Running, capturing: Running, target: TargetInfo, asked: argparse.Namespace) -> None:
        self.plain, self.capturing, self.target, self.asked = plain, capturing, target, asked
        self.about = info.read(capturing.endpoint.url)
        self.head = torch.load(asked.work / "head.pt").cuda()
        self.generator = torch.Generator().manual_seed(1)
        self.figures: dict[str, list[float]] = {}
        self.proofs: dict[str, Any] = {}
        self.split: list[dict[str, float]] = []

    def samples(self, count: int) -> list[list[int]]:
        """Random prompts."""
        size = (count, self.asked.tokens - ANSWER)
        return torch.randint(100, VOCAB - 100, size, generator=self.generator).tolist()

    def wants(self, prompts: list[list[int]]) -> list[Want]:
        """The prompts with the plain server's own greedy answers."""
        answers = ask(self.plain.endpoint.url, self.about, prompts, ANSWER, self.asked.concurrency)
        made = []
        for prompt, answer in zip(prompts, answers, strict=True):
            ids = prompt + answer
            made.append(Want("train", sample_key(ids, [i >= len(prompt) for i in range(len(ids))]), ids, len(prompt)))
        return made

    def turn(self, name: str, wants: list[Want], out: Path | None) -> None:
        """One turn of a server: captures into `out`, or plain prompts."""
        began = time.perf_counter()
        if out is None:
            url = (self.plain if name == "plain" else self.capturing).endpoint.url
            ask(url, self.about, [want.ids for want in wants], 1, self.asked.concurrency)
        else:
            shutil.rmtree(out, ignore_errors=True)
            out.mkdir(parents=True)
            proofs = Proofs(self.head, decoded=True)
            dtypes = {"train": torch.bfloat16}
            layers = (2, LAYERS // 2, LAYERS - 3)
            flow = Flow(out, [self.capturing.endpoint], self.about, self.target, layers, proofs, dtypes, 0.0, 1 << 30)
            flow.resume(wants)
            flow.capture(wants, self.asked.concurrency, Silent())
            assert sum(map(len, flow.shards["train"])) == len(wants), flow.quarantined
            self.proofs = proofs.counts()
            self.split.append({"name": name, **flow.seconds})
        seconds = time.perf_counter() - began
        if out is not None:
            shutil.rmtree(out)
        self.figures.setdefault(name, []).append(sum(len(want.ids) for want in wants) / seconds)
        print(f"{name}: {self.figures[name][-1]:.0f} tokens/s {self.split[-1] if out else ''}", flush=True)


def main() -> None:
    """Measure and write benchmarks/results/DATE-capture-NAME.json."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--name", required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--samples", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--idle", type=int, default=1, help="turns of the server with the plugin without captures")
    parser.add_argument("--to-disk", type=int, default=1, help="turns with shards on disk")
    parser.add_argument("--json", action="store_true", help="also measure hidden states returned as JSON")
    parser.add_argument("--work", type=Path, default=Path("/dev/shm/eyas-benchmark"), help="in memory")
    parser.add_argument("--disk", type=Path, default=Path("/tmp/eyas-benchmark"))
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("flags", nargs="*", help="flags of the server as NAME=VALUE")
    asked = parser.parse_args()
    args: dict[str, Any] = {"skip-tokenizer-init": True, "max-total-tokens": 120000}
    for flag in asked.flags:
        name, equals, value = flag.partition("=")
        args[name] = value if equals else True
    asked.disk.mkdir(parents=True, exist_ok=True)
    model = asked.work / "model"
    if not (model / "model.safetensors.index.json").exists():
        make_model(model)
        print("model made", flush=True)
    from safetensors import safe_open

    with safe_open(model / "top.safetensors", "pt") as file:
        torch.save(file.get_tensor("lm_head.weight"), asked.work / "head.pt")
    target = TargetInfo(
        model, json.loads((model / "config.json").read_text()), "LlamaForCausalLM", LAYERS, HIDDEN, VOCAB, (2,),
        "random", "none", "none",
    )  # fmt: skip
    ceilings = {"bfloat16_flops": flops(), "memory": copy_rates(asked.work), "disk": copy_rates(asked.disk)}
    print(ceilings, flush=True)
    torch.cuda.empty_cache()
    free = [torch.cuda.mem_get_info()[0]]

    def serve(name: str, share: float, capture: bool, **more: Any) -> Any:
        config = Server(python=sys.executable, tp=asked.tp, args={**args, "mem-fraction-static": share, **more})
        return started(config, model, "bfloat16", asked.disk / name, Silent(), capture=capture)

    with serve("plain", 0.35, False) as plain:
        free.append(torch.cuda.mem_get_info()[0])
        with serve("capturing", 0.6, True) as capturing:
            free.append(torch.cuda.mem_get_info()[0])
            print("servers ready", plain.seconds, capturing.seconds, flush=True)
            bench = Bench(plain, capturing, target, asked)
            few = bench.wants(bench.samples(32))
            for name, out in (("plain", None), ("captured", asked.work / "shards"), ("idle", None)):
                bench.turn(name, few, out)
            free += [torch.cuda.mem_get_info()[0]]
            bench.figures.clear()
            bench.split.clear()
            wants = bench.wants(bench.samples(asked.samples))
            touch(asked.work, 2 * asked.samples * asked.tokens * TOKEN_BYTES)
            for turn in range(asked.rounds):
                bench.turn("plain", wants, None)
                bench.turn("captured", wants, asked.work / "shards")
                if turn < asked.idle:
                    bench.turn("idle", wants, None)
                if turn < asked.to_disk:
                    bench.turn("captured_to_disk", wants, asked.disk / "shards")
            free += [torch.cuda.mem_get_info()[0]]
            if asked.tp > 1:
                request = client.Request(Wanted("ranks", len(wants[0].ids)), wants[0].ids)
                preflight.require_equal_ranks(capturing.endpoint, bench.about, request, VOCAB)
                several = states(capturing, bench.about, wants[:16])
    if asked.tp > 1:
        asked.tp = 1
        with serve("one", 0.6, True) as one:
            single = states(one, info.read(one.endpoint.url), wants[:16])
        asked.tp = bench.about.tp
        errors = [recaptured(several[key], single[key]) for key in single]
        bench.proofs["same_as_one_gpu"] = {
            "checked": len(errors),
            "failed": sum(reason is not None for reason, _ in errors),
            "worst": max(worst for _, worst in errors),
        }
        bench.proofs["ranks_agree"] = {"checked": 1, "failed": 0, "worst": None}
        print(bench.proofs, flush=True)
    if asked.json:
        with serve("json", 0.6, False, **{"enable-return-hidden-states": True}) as server:
            prompts = bench.samples(3)

            def fetch(ids: list[int]) -> None:
                body = {"input_ids": ids, "return_hidden_states": True, "extra_key": str(time.time_ns())}
                client.generate(
                    server.endpoint.url, {**body, "sampling_params": {"temperature": 0, "max_new_tokens": 1}}
                )

            fetch(prompts[0][:64])
            began = time.perf_counter()
            with ThreadPoolExecutor(len(prompts)) as pool:
                list(pool.map(fetch, prompts))
            rate = sum(map(len, prompts)) / (time.perf_counter() - began)
            bench.figures["json_last_layer_only"] = [rate]
    middle = {name: statistics.median(values) for name, values in bench.figures.items()}
    weights = LAYERS * (HIDDEN * HEAD * (2 * HEADS + 2 * KEYS) + 3 * HIDDEN * INNER)
    attention = LAYERS * 2 * HEADS * HEAD * asked.tokens  # causal: half of 4 T d a token
    operations = 2 * weights + attention
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    written = {
        "date": datetime.date.today().isoformat(),
        "commit": commit,
        "device": {"gpu": torch.cuda.get_device_name(), "count": asked.tp, "cores": len(os.sched_getaffinity(0))},
        "versions": {"sglang": bench.about.version, "torch": torch.__version__},
        "ceilings": ceilings,
        "what": {"samples": asked.samples, "tokens": asked.tokens, "rounds": asked.rounds, "flags": asked.flags,
                 "concurrency": asked.concurrency, "chunk": bench.about.chunk, "bytes_a_token": TOKEN_BYTES},
        "tokens_per_second": {name: [round(v, 1) for v in values] for name, values in bench.figures.items()},
        "median": {name: round(value, 1) for name, value in middle.items()},
        "ratio_to_plain": {name: round(value / middle["plain"], 4) for name, value in middle.items()},
        "plain_flops_share": middle["plain"] * operations / asked.tp / ceilings["bfloat16_flops"],
        "floor_tokens_per_second": ceilings["bfloat16_flops"] * asked.tp / operations,
        "seconds": bench.split,
        "proofs": bench.proofs,
        "free_device_bytes": dict(zip(("empty", "plain", "both", "warm", "end"), free, strict=True)),
        "server_start_seconds": {"plain": plain.seconds, "capturing": capturing.seconds},
    }  # fmt: skip
    asked.out.mkdir(parents=True, exist_ok=True)
    path = asked.out / f"{written['date']}-capture-{asked.name}.json"
    path.write_text(json.dumps(written, indent=1) + "\n")
    print(json.dumps({key: written[key] for key in ("median", "ratio_to_plain", "plain_flops_share")}))
    print(path)


if __name__ == "__main__":
    main()
