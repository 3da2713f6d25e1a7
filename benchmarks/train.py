"""The speed of training, on one GPU, with random features of a target's shape.

    python benchmarks/train.py --out DIR [--only llama,realistic,...] [--seconds 8] [--no-cudnn] [--name train]

Prints and writes DIR/NAME.json, part by part: the device's ceilings, the gradients of the fast paths against float64,
then tokens a second and peak memory of whole optimizer steps (forward, backward, AdamW). The matrix products' floor is
counted from the shapes: 6 operations a weight and row, and what the measured rate makes of them.
"""

import argparse
import json
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from itertools import cycle, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from eyas.draft import flash, fused
from eyas.draft.attention import attend
from eyas.draft.chains import Chains, chains
from eyas.draft.config import DraftConfig
from eyas.draft.loss import Teacher, unrolled_loss
from eyas.draft.model import DraftModel
from eyas.draft.unroll import unroll
from eyas.store.shard import Sample
from eyas.train.loader import Loader
from eyas.train.loop import Trainer
from eyas.train.packing import pack

ROPE = {"rope_type": "default", "rope_theta": 500000.0}
LLAMA = DraftConfig(4096, 14336, 32, 8, 128, 128256, 32000, 1e-5, ROPE, 131072)
KIMI = DraftConfig(7168, 18432, 64, 64, 112, 163840, 32000, 1e-5, ROPE, 131072)
SMOL = DraftConfig(576, 1536, 9, 3, 64, 49152, 16384, 1e-5, ROPE, 8192)
SETTINGS = SimpleNamespace(
    ttt_steps=7, step_decay=0.8, temperature=1.0, optimizer="adamw", learning_rate=1e-4, warmup=0.015,
    final_learning_rate=0.02, betas=[0.9, 0.95], weight_decay=0.0, clip=1.0,
)  # fmt: skip
GPU, CPU = torch.device("cuda"), torch.device("cpu")


def make_draft(c: DraftConfig, dtype: torch.dtype, device: torch.device = GPU) -> DraftModel:
    """A draft with small random weights; embeddings in `dtype`."""
    with torch.device("meta"):
        draft = DraftModel(c, torch.nn.Embedding(c.vocab_size, c.hidden_size))
    draft.embed_tokens.to(dtype)
    draft = draft.to_empty(device=device)
    ids = torch.arange(c.draft_vocab_size, device=device) * (c.vocab_size // c.draft_vocab_size)
    draft.set_vocabulary(ids)
    turns = torch.arange(0, c.head_dim, 2, device=device) / c.head_dim
    draft.inverse_frequencies.copy_(c.rope_parameters["rope_theta"] ** -turns)
    with torch.no_grad():
        for p in draft.parameters():
            p.fill_(1.0) if p.dim() == 1 else p.normal_(0, 0.02)
    return draft


def sample(c: DraftConfig, length: int, prompt: int, dtype: torch.dtype, device: torch.device = GPU) -> Sample:
    """Random states, in host memory; the answer begins after `prompt` tokens."""
    ids = torch.randint(0, c.vocab_size, (length,))
    aux = torch.randn(length, 3 * c.hidden_size, device=device).to(dtype).cpu()
    last = torch.randn(length, c.hidden_size, device=device).to(dtype).cpu()
    argmax = torch.randint(0, c.vocab_size, (length,))
    argmax = argmax // (c.vocab_size // c.draft_vocab_size) * (c.vocab_size // c.draft_vocab_size)
    return Sample(f"{length}", ids, torch.arange(length) >= prompt, aux, last, argmax)


def realistic(count: int, longest: int = 4096) -> list[int]:
    """Lengths: lognormal, median 450, sigma 0.9."""
    generator = torch.Generator().manual_seed(1)
    return (450 * (0.9 * torch.randn(count, generator=generator)).exp()).round().clamp(16, longest).int().tolist()


def ceilings() -> dict[str, float]:
    """Measured bf16 products (8192 cubed, random data) and memory traffic."""
    a, b = (torch.randn(8192, 8192, device=GPU, dtype=torch.bfloat16) for _ in range(2))
    matmul = timed(lambda: a @ b, 20)
    big = torch.empty(1 << 30, device=GPU)
    other = torch.empty_like(big)
    copy = timed(lambda: other.copy_(big), 10)
    return {"bfloat16_flops": 2 * 8192**3 / matmul, "memory_bytes": 8 * (1 << 30) / copy}


def timed(work: Callable[[], Any], times: int) -> float:
    """Seconds a call, after three."""
    for _ in range(3):
        work()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(times):
        work()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / times


def distance(ours: torch.Tensor, exact: torch.Tensor) -> float:
    """Relative error in norm."""
    return float((ours.double().cpu() - exact.double().cpu()).norm() / exact.double().norm().clamp_min(1e-30).cpu())


def masks() -> tuple[torch.Tensor, torch.Tensor]:
    """Answers and starts of documents with one, several and no runs, of one to 700 rows."""
    parts = [(40, 700), (3, 1, 9), (5, 3), (300, 90, 20, 77, 4, 150), (64,), (1, 500)]
    answer = [torch.cat([torch.full((n,), i % 2 == 1) for i, n in enumerate(part)]) for part in parts]
    return torch.cat(answer), torch.tensor([0] + [len(a) for a in answer]).cumsum(0)


def check_attention() -> dict[str, float]:
    """The flash path in bfloat16 against the plain one in float64 on the same numbers."""
    answer, starts = masks()
    what = chains(torch.zeros(len(answer), dtype=torch.int64), answer, starts, 4)
    errors = {}
    for heads, groups, size in ((32, 8, 128), (9, 3, 64), (8, 8, 112)):
        shapes = [(len(what), heads, size)] + [(int(what.key_starts[-1]), groups, size)] * 2
        shapes += [(len(what), groups, size)] * 4
        tensors = [torch.randn(shape, device=GPU).bfloat16() for shape in shapes]
        grad = torch.randn(shapes[0], device=GPU).bfloat16()
        found = []
        for dtype in (torch.bfloat16, torch.float64):
            query, key, value, *own = leaves = [t.detach().clone().to(dtype).requires_grad_() for t in tensors]
            with fused.compiling() if dtype == torch.bfloat16 else nullcontext():
                out = attend(what.to(GPU), query, key, value, [(own[0], own[1]), (own[2], own[3])])
                out.backward(grad.to(dtype))
            found.append([out.detach(), *(leaf.grad for leaf in leaves)])
        names = ["out", "query", "key", "value", "own_key", "own_value", "own_key2", "own_value2"]
        for name, ours, exact in zip(names, *found, strict=True):
            errors[f"{heads}x{size}.{name}"] = distance(ours, exact)
    return errors


def check_whole() -> dict[str, float]:
    """Loss and every gradient of a small draft: compiled in bfloat16 on the GPU, against float64."""
    c = DraftConfig(512, 1024, 8, 2, 64, 4000, 1000, 1e-5, ROPE, 8192)
    answer, starts = masks()
    spans = list(pairwise(starts.tolist()))
    torch.manual_seed(0)
    whole = [sample(c, b - a, 0, torch.bfloat16, CPU) for a, b in spans]
    samples = [replace(s, answer=answer[a:b]) for s, (a, b) in zip(whole, spans, strict=True)]
    weights = make_draft(c, torch.bfloat16).state_dict()
    head = torch.randn(c.draft_vocab_size, c.hidden_size).mul(0.05).bfloat16()
    found = []
    for dtype, device in ((torch.bfloat16, GPU), (torch.float64, GPU)):
        draft = make_draft(c, dtype if dtype == torch.float64 else torch.bfloat16, device)
        draft.load_state_dict({k: v.bfloat16() if v.is_floating_point() else v for k, v in weights.items()})
        if dtype == torch.float64:
            draft.double()
        draft.work_in(dtype)
        batch = pack(samples, 7, device, dtype)
        with fused.compiling() if dtype == torch.bfloat16 else nullcontext():
            outputs = list(unroll(draft, batch.chains, batch.aux))
            teacher = Teacher(batch.last, draft.t2d[batch.argmax], head.to(device, dtype))
            loss = unrolled_loss(draft, batch.chains, outputs, teacher, batch.chains.counts, 0.8)
            loss.backward()
        found.append({"loss": loss.detach()} | {n: p.grad for n, p in draft.named_parameters() if p.requires_grad})
    return {name: distance(found[0][name], exact) for name, exact in found[1].items()}


def operations(c: DraftConfig, what: Chains) -> float:
    """Of the matrix products and the step-0 attention of one optimizer step on a batch, forward and backward."""
    h, head, rows, steps = c.hidden_size, c.head_dim, len(what), what.steps
    narrow = 2 * h * c.num_key_value_heads * head * 2
    wide = 3 * h * c.num_attention_heads * head + 3 * h * c.intermediate_size
    seen = len(what.seen) * (3 * h * h + narrow)
    later = rows * (steps * wide + (steps - 1) * narrow) + float(what.counts.sum()) * h * c.draft_vocab_size
    pairs = sum((d - c_) * (b - a) - (b - a) ** 2 / 2 for a, b, c_, d in what.spans)
    attention = 3.5 * 4 * steps * pairs * c.num_attention_heads * head
    return 6 * (seen + later) + 2 * rows * h * c.draft_vocab_size + attention


def speed(c: DraftConfig, batches: list[list[Sample]], seconds: float, profile: Path | None = None) -> dict[str, Any]:
    """Whole optimizer steps over `batches` from host memory, again and again for `seconds`."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    draft = make_draft(c, torch.bfloat16)
    head = torch.randn(c.draft_vocab_size, c.hidden_size, device=GPU).mul_(0.02)
    trainer = Trainer(draft, head, SETTINGS, 1_000_000, torch.bfloat16)

    loader = Loader(lambda samples: pack(samples, SETTINGS.ttt_steps, GPU, torch.bfloat16), cycle(batches), GPU)
    lengths = cycle([sum(len(s.ids) for s in samples) for samples in batches])
    feed, began = zip(loader, lengths, strict=False), time.perf_counter()
    for (batch, _), _ in zip(feed, range(4), strict=False):
        trainer.step(batch)
    first, tokens, count, work = trainer.loss, 0, 0, 0.0
    compiled, waited = time.perf_counter() - began, loader.waited
    began = time.perf_counter()
    for batch, length in feed:
        trainer.step(batch)
        tokens, count, work = tokens + length, count + 1, work + operations(c, batch.chains)
        if time.perf_counter() - began > seconds:
            break
    torch.cuda.synchronize()
    took = time.perf_counter() - began
    waited = loader.waited - waited
    if profile is not None:
        from torch.profiler import ProfilerActivity
        from torch.profiler import profile as watch

        with watch(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
            trainer.step(next(feed)[0])
            torch.cuda.synchronize()
        table = found.key_averages().table(sort_by="self_cuda_time_total", row_limit=45, max_name_column_width=70)
        profile.write_text(table)
    return {
        "tokens_per_second": tokens / took, "seconds_a_step": took / count, "tokens_a_step": tokens / count,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30, "flops": work / took, "first_steps_seconds": compiled,
        "waited_for_loader": waited / took,
        "losses": [first, trainer.loss],
    }  # fmt: skip


def main() -> None:
    """Everything, or what `--only` names."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="")
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--no-cudnn", action="store_true", help="FlashAttention 2 alone, as on cards where it is best")
    parser.add_argument("--name", default="train")
    asked = parser.parse_args()
    if asked.no_cudnn:
        flash.cudnn_is_better = lambda *_: False
    asked.out.mkdir(parents=True, exist_ok=True)
    bf16 = torch.bfloat16

    def rows(c: DraftConfig, budget: int, count: int, longest: int = 4096) -> list[list[Sample]]:
        lengths, batches = iter(realistic(10_000, longest)), []
        for _ in range(count):
            batch: list[Sample] = []
            while True:
                length = next(lengths)
                if batch and sum(len(s.ids) for s in batch) + length > budget:
                    break
                batch.append(sample(c, length, round(0.4 * length), bf16))
            batches.append(batch)
        return batches

    def whole(c: DraftConfig, length: int, count: int = 2) -> list[list[Sample]]:
        return [[sample(c, length, 0, bf16)] for _ in range(count)]

    s, out = asked.seconds, asked.out
    parts: dict[str, Callable[[], Any]] = {
        "ceilings": ceilings,
        "kernels": lambda: {f"{a}x{e}": flash.compare(a, g, e, GPU) for a, g, e in ((32, 8, 128), (64, 64, 112))},
        "attention": check_attention,
        "gradients": check_whole,
        "llama": lambda: speed(LLAMA, whole(LLAMA, 4096), s, out / f"{asked.name}-llama.txt"),
        "realistic": lambda: speed(LLAMA, rows(LLAMA, 8192, 6), s, out / f"{asked.name}-realistic.txt"),
        "kimi": lambda: speed(KIMI, whole(KIMI, 8192), s),
        "kimi_32k": lambda: speed(KIMI, whole(KIMI, 32768, 1), s),
        "smol": lambda: speed(SMOL, rows(SMOL, 8192, 6, 512), s, out / f"{asked.name}-smol.txt"),
    }
    report: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    for name, part in parts.items():
        if asked.only and name not in asked.only.split(","):
            continue
        began = time.perf_counter()
        torch.compiler.reset()  # another shape begins anew, as it would in a process of its own
        try:
            report[name] = part()
        except Exception as error:  # the others are still worth their time
            import traceback

            traceback.print_exc()
            report[name] = f"{type(error).__name__}: {error}"[:2000]
        print(name, f"{time.perf_counter() - began:.0f} s", json.dumps(report[name]), flush=True)
        (out / f"{asked.name}.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
