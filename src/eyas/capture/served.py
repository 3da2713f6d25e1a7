"""The capture step of an SGLang run: every answered prompt is sent to the server once more, whole, and its states are
proven as they arrive.

Replies go to threads that read and prove them; what passed is gathered into shards, and a capture file is deleted only
once its shard is durable. A share is captured again at the end, each alone, and compared. A later attempt goes on by
sample key. Stands between answers and training; `train/` and `heldout/` in its output are stores, just as those of the
in-process step.
"""

import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from eyas.capture import keep, preflight
from eyas.capture.contract import FORMAT, Contract
from eyas.capture.flow import Flow, Want, forgiving
from eyas.capture.proofs import Proofs, require_share
from eyas.capture.witness import Witness
from eyas.config import Capture, Engine, Server, Store
from eyas.corpus.keys import sample_key
from eyas.engines import target as targets
from eyas.engines import weights
from eyas.engines.device import native_bfloat16, pick_device
from eyas.engines.layers import resolve
from eyas.engines.sglang import answers, capturefile, client, info
from eyas.engines.sglang.answers import SPLITS
from eyas.engines.sglang.checks import to_sample
from eyas.engines.sglang.client import Lost
from eyas.engines.sglang.info import ServerInfo
from eyas.engines.sglang.server import Endpoint, endpoints
from eyas.engines.target import TargetInfo
from eyas.errors import UserError
from eyas.files import read_json, write_json
from eyas.progress import Progress
from eyas.spec import StepSpec
from eyas.store.codec import FP8
from eyas.store.manifest import Quarantined
from eyas.store.sample import Sample, completed

RECAPTURED = 64
"""Most samples that are captured again, whatever capture.proof_share says: each costs the server a pass of its own."""
FEW = 50
"""Below this many captured again, a single one that differs stops the run."""
FIGURES = "figures.json"


@dataclass(frozen=True)
class Sources:
    """What a run captures from: servers, what they say, and the target that they serve."""

    ends: list[Endpoint]
    about: list[ServerInfo]
    target: TargetInfo
    layers: tuple[int, int, int]
    dtype: torch.dtype
    """Of the server's states."""


def run(spec: StepSpec, out: Path, progress: Progress) -> dict[str, Any]:
    """Step entry; leases `server`. Raises UserError: no plugin, no room, too many samples failed, an empty split."""
    if (out / FIGURES).exists():  # an earlier attempt ended between its last act and the runner's
        return _finished(out)
    with forgiving(out):
        return _run(spec, out, progress)


def _run(spec: StepSpec, out: Path, progress: Progress) -> dict[str, Any]:
    config = spec.section(Capture)
    torch.set_num_threads(1)  # samples are proven side by side
    with client.leased():
        sources = look(spec)
        wants, dropped = read_wants(spec.inputs["answers"], sources)
        store = spec.section(Store)
        stored = {"train": keep.stored(store, _stored(config, sources.dtype)), "heldout": sources.dtype}
        longest = max(len(want.ids) for want in wants)
        for about in sources.about:
            info.require_capturable(about, longest, sources.target.vocab_size)
        progress.milestone("reading the target's head")
        head = read_head(sources, pick_device(spec.section(Engine)))
        proofs = Proofs(head, decoded=True)
        flow = Flow(
            out,
            sources.ends,
            tightest(sources.about),
            sources.target,
            sources.layers,
            proofs,
            stored,
            config.max_quarantined,
            store.shard_mib << 20,
        )
        progress.milestone("looking at what earlier attempts captured")
        flow.resume(wants)
        _require_space(sources, flow, wants, longest, out, progress)
        for end, about in zip(sources.ends, sources.about, strict=True):
            middle = sorted(wants, key=lambda want: len(want.ids))[len(wants) // 2]
            preflight.require_equal_ranks(end, about, flow.request(middle, "ranks"), sources.target.vocab_size)
        flow.capture(wants, spec.section(Server).concurrency, progress)
        progress.milestone("capturing a share again, alone")
        began = time.perf_counter()
        witness = Witness(head, sources.target) if config.witness else None
        again = capture_again(flow, sources, proofs, config, witness)
        flow.seconds["recapture"] = time.perf_counter() - began
    result = keep.nothing()
    for split in SPLITS:
        failed = [*flow.quarantined[split], *again[split]]
        total = sum(want.split == split for want in wants)
        require_share(failed, total, config.max_quarantined)
        kept = keep.without(flow.shards[split], {q.key for q in again[split]}, out / "shards" / "mended")
        if not kept:
            raise UserError(f"capture: no {split} sample is left: are the prompts ones that the target answers?")
        keep.add_store(result, out / split, contract(spec, sources, stored[split]), kept, failed)
    keep.add_proofs(result, proofs)
    if witness is not None:
        result["proofs"]["witness"] = witness.count
    result |= {
        "dropped": dropped,
        "seconds": {name: round(seconds, 3) for name, seconds in flow.seconds.items()},
        "tokens_per_second": round(flow.tokens / flow.seconds["server"], 1) if flow.tokens else None,
        "versions": {"sglang": sources.about[0].version, "torch": torch.__version__},
    }
    write_json(out / FIGURES, result)
    return _finished(out)


def look(spec: StepSpec) -> Sources:
    """Ask the leased servers who they are. Raises UserError: a plugin that is missing or captures something else."""
    capture, target = spec.section(Capture), targets.read(spec.inputs["target"])
    layers = resolve(capture.layers, capture.convention, target.num_layers)
    ends = endpoints(spec.services["server"])
    about = [info.read(end.url) for end in ends]
    said = [preflight.require_plugin(*pair, target, layers) for pair in zip(ends, about, strict=True)]
    if len({one["dtype"] for one in said}) > 1:
        raise UserError(
            f"server.url: the servers serve in {', '.join(sorted({one['dtype'] for one in said}))}; take one"
        )
    return Sources(ends, about, target, layers, preflight.DTYPES[said[0]["dtype"]])


def tightest(about: Sequence[ServerInfo]) -> ServerInfo:
    """What holds for all servers: the first one's figures with the smallest chunk and KV pool of any."""
    chunks = [one.chunk for one in about if one.chunk]
    return replace(about[0], chunk=min(chunks, default=None), kv_tokens=min(one.kv_tokens for one in about))


def read_wants(folder: Path, sources: Sources) -> tuple[list[Want], dict[str, int]]:
    """The samples to be captured, longest first, and how many answers were left out, by reason.

    Longest first shows at once whether memory suffices. Raises UserError: ids outside the vocabulary.
    """
    most = min(map(answers.room, sources.about))
    wants: dict[str, Want] = {}
    dropped = {"empty": 0, "duplicate": 0, "too_long": 0}
    for split in ("heldout", "train"):  # what occurs in both stays held out
        for row in answers.read(folder, split):
            mask = [i >= row.prompt for i in range(len(row.ids))]
            key = sample_key(row.ids, mask)
            client.check_ids(row.ids, sources.target.vocab_size, f"answer {row.key}")
            if len(row.answer) < 2:
                dropped["empty"] += 1
            elif key in wants:
                dropped["duplicate"] += 1
            elif len(row.ids) > most:
                dropped["too_long"] += 1
            else:
                wants[key] = Want(split, key, row.ids, row.prompt)
    for split in SPLITS:
        if not any(want.split == split for want in wants.values()):
            raise UserError(f"capture: no {split} answer can be captured ({dropped}): are the prompts ones it answers?")
    return sorted(wants.values(), key=lambda want: -len(want.ids)), dropped


def read_head(sources: Sources, device: torch.device) -> torch.Tensor:
    """The target's head [V, H], where it is multiplied fastest: on the GPU if it fits beside the server."""
    head = weights.head(sources.target.folder)
    if device.type == "cuda":
        try:
            return head.to(device, sources.dtype)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
    # bfloat16 is several times slower on a processor that does not multiply it natively.
    return head.to(sources.dtype if native_bfloat16() else torch.float32)


def capture_again(
    flow: Flow, sources: Sources, proofs: Proofs, config: Capture, witness: Witness | None
) -> dict[str, list[Quarantined]]:
    """Capture a share of the kept samples again, one at a time, nothing beside it, and compare.

    Raises UserError where more of the share differ than may fail at all: then the others cannot be trusted either.
    """
    kept = [(split, shard, i) for split in SPLITS for shard in flow.shards[split] for i in range(len(shard))]
    count = min(RECAPTURED, len(kept), max(1, round(config.proof_share * len(kept))))
    chosen = [kept[i * len(kept) // count] for i in range(count)]
    failed: dict[str, list[Quarantined]] = {split: [] for split in SPLITS}
    for number, (split, shard, i) in enumerate(chosen):
        end = sources.ends[number % len(sources.ends)]
        sample = shard.sample(i)
        other = alone(flow, end, split, sample)
        if isinstance(other, str):
            failed[split].append(Quarantined(sample.key, other))
            continue
        sample = completed(sample, other)
        reason = proofs.check_again(sample, other)
        if reason is None and witness is not None:
            # Rounded to fp8 the last states give other log-probabilities; the second capture is what they were.
            reason = witness.check(end.url, replace(sample, last=other.last) if shard.dtype == FP8 else sample)
        if reason is not None:
            failed[split].append(Quarantined(sample.key, reason))
    every = [one for part in failed.values() for one in part]
    if len(every) > 1 or (every and count < FEW):
        require_share(every, count, config.max_quarantined)
    return failed


def alone(flow: Flow, end: Endpoint, split: str, sample: Sample) -> Sample | str:
    """A second capture of a sample's ids, or why there is none. What is lost, or gone before it was read, is asked for
    once more. Raises ServerDied."""
    assert end.root is not None
    why = ""
    for kind in ("again", "once-more"):
        request = flow.request(Want(split, sample.key, sample.ids.tolist(), 0), kind)
        vocab_size = flow.target.vocab_size
        (reply,) = client.capture([end], [request], info=flow.about, concurrency=1, vocab_size=vocab_size)
        if isinstance(reply, Lost):
            why = f"recaptured: {reply.reason}"
            continue
        try:
            captured = capturefile.read(reply.path, end.root)
        except UserError as error:
            why = f"recaptured: {error}"
            continue
        finally:
            reply.path.unlink(missing_ok=True)
        if captured.ids.tolist() != request.ids:
            return "recaptured: the forward pass saw other ids than were sent"
        return replace(to_sample(sample.key, captured, reply.token), answer=sample.answer)
    return why


def contract(spec: StepSpec, sources: Sources, stored: torch.dtype) -> Contract:
    """What the states of a split are."""
    target, about, server = sources.target, sources.about[0], spec.section(Server)
    flags = {
        "computed_in": str(sources.dtype).removeprefix("torch."),
        "tp": str(about.tp),
        "chunk": str(about.chunk),
        "radix": str(about.radix),
        "servers": str(len(sources.ends)),
    }
    flags |= {name: str(value) for name, value in server.args.items() if "attention-backend" in name}
    return Contract(
        format=FORMAT,
        model_digest=target.model_digest,
        tokenizer_digest=target.tokenizer_digest,
        template_digest=target.template_digest,
        layers=sources.layers,
        last_is_normed=True,
        dtype=str(stored).removeprefix("torch."),
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        engine="sglang",
        engine_version=about.version,
        flags=flags,
    )


def _require_space(
    sources: Sources, flow: Flow, wants: Sequence[Want], longest: int, out: Path, progress: Progress
) -> None:
    """Room for what is left to be captured; an earlier attempt's shards lie there already. Says what there is."""
    roots = [end.root for end in sources.ends if end.root is not None]
    width = 4 * sources.target.hidden_size
    under_way = 2 * longest * width * sources.dtype.itemsize
    states = flow.plan(flow.left(wants))
    progress.milestone(preflight.require_space(roots, out, under_way, states, width * flow.stored["train"].itemsize))


def _stored(config: Capture, dtype: torch.dtype) -> torch.dtype:
    return dtype if config.dtype == "auto" else preflight.DTYPES[config.dtype]


def _finished(out: Path) -> dict[str, Any]:
    """The result, once nothing is left that was only needed to go on."""
    shutil.rmtree(out / "shards", ignore_errors=True)
    for path in _scratch(out):
        path.unlink(missing_ok=True)
    result: dict[str, Any] = read_json(out / FIGURES)
    return result


def _scratch(out: Path) -> Iterator[Path]:
    yield from (out / name for name in ("quarantined.jsonl", "proofs.json"))
