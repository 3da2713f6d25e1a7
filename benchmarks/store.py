"""The feature store against the disk's own speed and against one file a sample, at 7168-wide states.

    python benchmarks/store.py --name NAME [--folder DIR] [--tokens 6000] [--rounds 5]

All ways of writing take the same samples in turns, round after round, each file made durable: `dd conv=fsync` as the
ceiling, the store in bfloat16 and in fp8 (what is encoded counts), one `torch.save` and fsync a sample. Reading takes
single samples in random order into a buffer that is used again, with an empty page cache and with a full one; raw is
`preadv` of as many bytes. `first` compares the sample's digest too, as the first reading of each does. Bytes of padded
batches are reckoned, from 10,000 drawn lengths, as is the layout of a store of them; the layout of what was written
equals the file to the byte. `load` is the machine's load average before and after. Ratios are of one round; told are
their medians, least and largest.
"""

import argparse
import datetime
import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from eyas.capture.contract import Contract
from eyas.store.codec import FP8, decode, encode
from eyas.store.filling import Filling
from eyas.store.layout import Layout, Place
from eyas.store.sample import Sample, place
from eyas.store.store import FeatureStore, create

HIDDEN, LONGEST, SIGMA, MEDIAN = 7168, 4096, 0.8, 800
WRITERS = 2


def lengths(count: int, seed: int = 0) -> list[int]:
    """Lognormal, capped."""
    normal = torch.randn(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (MEDIAN * (SIGMA * normal).exp()).round().clamp(2, LONGEST).long().tolist()


def make(tokens: int) -> list[Sample]:
    """About as many tokens of states; all samples share their memory."""
    states = torch.randn(LONGEST, 4 * HIDDEN, generator=torch.Generator().manual_seed(1)).bfloat16()
    states[0] *= 1000
    found: list[Sample] = []
    for i, length in enumerate(lengths(1000)):
        if sum(len(one.ids) for one in found) >= tokens:
            break
        ids = torch.arange(length)
        aux, last = states[:length, : 3 * HIDDEN].contiguous(), states[:length, 3 * HIDDEN :].contiguous()
        found.append(Sample(f"s{i}", ids, ids >= length // 2, aux, last, ids))
    return found


def write_store(folder: Path, samples: list[Sample], dtype: torch.dtype) -> Filling:
    """As a capture does: samples on two threads, each into its place."""
    folder.mkdir()
    filling = Filling(folder, "x", HIDDEN, dtype)
    filling.plan([place(one) for one in samples], 1 << 30, 4096)
    with ThreadPoolExecutor(WRITERS) as pool:
        list(pool.map(lambda one: filling.put([one]), samples))
    filling.finish()
    return filling


def write_files(folder: Path, samples: list[Sample]) -> None:
    """One pickled file a sample."""
    folder.mkdir()
    for one in samples:
        with (folder / f"{one.key}.pt").open("wb") as file:
            value = {"input_ids": one.ids, "loss_mask": one.answer, "aux": one.aux, "last": one.last}
            torch.save(value, file)
            file.flush()
            os.fsync(file.fileno())


def write_dd(path: Path, count: int) -> None:
    """The disk's own speed."""
    command = ["dd", "if=/dev/zero", f"of={path}", "bs=8M", f"count={count >> 23}", "conv=fsync", "status=none"]
    subprocess.run(command, check=True)


def timed(act: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds."""
    began = clock()
    act()
    return clock() - began


def forget(path: Path) -> None:
    """Empty the page cache of a file."""
    handle = os.open(path, os.O_RDONLY)
    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(handle)


def read_store(store: FeatureStore, order: list[int], buffer: torch.Tensor) -> None:
    """Every sample into the buffer, as training does into its own."""
    for i in order:
        shard, index = store.where(i)
        layout = Layout([shard.place(index)], HIDDEN, shard.dtype)
        into, first = {}, 0
        for name, (_, dtype, shape) in list(layout.tensors.items())[3:]:
            count = layout.span(name, 0)[1]
            into[name] = buffer[first : first + count].view(dtype).view(shape)
            first += -(-count // 8) * 8
        store.read(i, into)


def read_raw(path: Path, places: list[tuple[int, int]], buffer: memoryview) -> None:
    """As many bytes from as many places."""
    handle = os.open(path, os.O_RDONLY)
    for first, count in places:
        done = 0
        while done < count:
            done += os.preadv(handle, [buffer[done:count]], first + done)
    os.close(handle)


def reading(folder: Path, filling: Filling, rounds: int) -> dict[str, list[float]]:
    """Bytes a second of the store over those of raw reads, a ratio a round."""
    paths = [shard.path for shard in filling.shards]
    assert len(paths) == 1, "the raw reads take one file"
    dtype = str(filling.shards[0].dtype).removeprefix("torch.")
    contract = Contract(1, "m", "t", "c", (1, 2, 3), True, dtype, HIDDEN, 9, "e", "1", {})
    create(folder, contract, paths)
    path = folder / "shard-00000.safetensors"
    layout = filling.shards[0].layout
    sizes = [sum(layout.span(name, i)[1] for name in layout.columns) for i in range(len(layout.places))]
    buffer = torch.empty(max(sizes) + 64, dtype=torch.uint8).fill_(0)
    found: dict[str, list[float]] = {}
    for number in range(rounds):
        order = torch.randperm(len(sizes), generator=torch.Generator().manual_seed(number)).tolist()
        starts = [sum(sizes[:i]) for i in order]
        raw = list(zip(starts, [sizes[i] for i in order], strict=True))
        for cache in ("empty", "full"):
            for turn in ("first", "later"):
                store = FeatureStore.open(folder)
                if turn == "later":
                    read_store(store, order, buffer)
                if cache == "empty":
                    forget(path)
                ours = timed(lambda store=store, order=order: read_store(store, order, buffer))
                if cache == "empty":
                    forget(path)
                theirs = timed(lambda raw=raw: read_raw(path, raw, buffer.numpy().data))
                found.setdefault(f"{cache} cache, {turn}", []).append(theirs / ours)
    return found


def padding() -> dict[str, float]:
    """Bytes of stores over those of padded batches of 32 in bfloat16, reckoned."""
    drawn = lengths(10_000, seed=7)
    padded = sum(32 * max(drawn[i : i + 32]) for i in range(0, len(drawn) - 31, 32)) * (4 * HIDDEN * 2 + 9)
    used = drawn[: len(drawn) // 32 * 32]
    found = {}
    for name, dtype in (("bf16", torch.bfloat16), ("fp8", FP8)):
        for supervised, share in (("all", 1.0), ("half", 0.5)):
            places = [Place(str(i), length, round(length * share)) for i, length in enumerate(used)]
            found[f"{name}, last at {supervised} tokens"] = Layout(places, HIDDEN, dtype).size / padded
    return found


def spread(ratios: list[float]) -> dict[str, float]:
    """Median, least and largest."""
    return {"median": statistics.median(ratios), "least": min(ratios), "largest": max(ratios)}


def main() -> None:
    """Measure and write benchmarks/results/DATE-store-NAME.json."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--name", required=True)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--tokens", type=int, default=6000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    samples = make(asked.tokens)
    tokens = sum(len(one.ids) for one in samples)
    ways: dict[str, list[float]] = {"dd": [], "bf16": [], "fp8": [], "torch.save": []}
    sizes: dict[str, int] = {}
    reads: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory(dir=asked.folder) as name:
        folder = Path(name)
        for number in range(asked.rounds):
            count = tokens * 4 * HIDDEN * 2 >> 23 << 23
            ways["dd"].append(timed(lambda count=count: write_dd(folder / "dd", count)) / count)
            (folder / "dd").unlink()
            for kind, dtype in (("bf16", torch.bfloat16), ("fp8", FP8)):
                path = folder / f"{kind}{number}"
                made: list[Filling] = []
                seconds = timed(lambda p=path, d=dtype, m=made: m.append(write_store(p, samples, d)))
                sizes[kind] = sum(shard.bytes for shard in made[0].shards)
                ways[kind].append(seconds)
                if number == asked.rounds - 1:
                    reads[kind] = reading(folder / f"store-{kind}", made[0], asked.rounds)
                    shutil.rmtree(folder / f"store-{kind}")
                shutil.rmtree(path)
            ways["torch.save"].append(timed(lambda: write_files(folder / "pt", samples)))
            sizes["torch.save"] = sum(path.stat().st_size for path in (folder / "pt").iterdir())
            shutil.rmtree(folder / "pt")
    aux = max((one.aux for one in samples), key=len)
    codes, scale = encode(aux, 3)
    encoded = min(timed(lambda: encode(aux, 3), time.process_time) for _ in range(3))
    decoded = min(timed(lambda: decode(codes, scale, torch.bfloat16), time.process_time) for _ in range(3))
    per_byte = [seconds / sizes["bf16"] for seconds in ways["bf16"]]
    report = {
        "date": datetime.date.today().isoformat(),
        "commit": subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip(),
        "device": f"{os.cpu_count()} CPU cores, torch {torch.__version__}",
        "load": [load, os.getloadavg()[0]],
        "ceilings": {"dd_bytes_per_second": 1 / statistics.median(ways["dd"])},
        "what": {"hidden": HIDDEN, "samples": len(samples), "tokens": tokens, "rounds": asked.rounds, "bytes": sizes},
        "rows": {
            "write, bf16 over dd": spread([d / o for d, o in zip(ways["dd"], per_byte, strict=True)]),
            "write, bf16 over torch.save": spread(
                [t / o for t, o in zip(ways["torch.save"], ways["bf16"], strict=True)]
            ),
            "write, fp8 over torch.save": spread([t / o for t, o in zip(ways["torch.save"], ways["fp8"], strict=True)]),
            "bytes, fp8 over torch.save": sizes["fp8"] / sizes["torch.save"],
            "bytes, over padded batches of 32": padding(),
            "read, over preadv": {
                kind: {way: spread(ratios) for way, ratios in found.items()} for kind, found in reads.items()
            },
            "codec, bytes of bfloat16 a second of processor time": {
                "encode": aux.nbytes / encoded,
                "decode": aux.nbytes / decoded,
            },
        },
    }
    path = asked.out / f"{report['date']}-store-{asked.name}.json"
    path.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report["rows"], indent=1))


if __name__ == "__main__":
    main()
