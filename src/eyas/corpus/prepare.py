"""`eyas prepare`: files of conversations -> samples.jsonl, rejected.jsonl and a report of both.

The files are cut into blocks, which the worker processes take in turn; this process only counts and writes, in the
files' order, so that neither time nor memory depends on anything but the rows. Stopped anywhere, the same command finds
what was finished in the cache.

    samples.jsonl    {"key": sample key, "ids": […], "spans": [[start, end), …], "source": "file:line"}
    rejected.jsonl   {"file", "line", "reason", "detail"}
    report.json      counts

`spans` are the supervised tokens.
"""

import json
import multiprocessing
import os
import signal
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eyas.corpus import files
from eyas.corpus.cache import Cache, Seen
from eyas.corpus.files import Block
from eyas.corpus.template import NO_ANSWER, NO_REASONING, NO_TAGGED, NOT_PREFIX
from eyas.corpus.tokens import TOO_LONG
from eyas.corpus.work import Done, Orders, Worker
from eyas.datafiles import BUILTIN, expand, refuse_inputs
from eyas.errors import UserError
from eyas.files import replacing, write_json
from eyas.progress import Progress

CACHE, SAMPLES, REJECTED, REPORT = "cache.sqlite3", "samples.jsonl", "rejected.jsonl", "report.json"
ALONE_BYTES = 2 << 20
"""Below this, other processes take longer to start than to work."""
HINTS = {
    NO_ANSWER: "the data hold questions only: let the target answer them (eyas regenerate)",
    NOT_PREFIX: "the template's generation prompt (add_generation_prompt) and what it makes of assistant messages do "
    "not fit together: mend either, or mark answers with {% generation %}",
    NO_TAGGED: "{% generation %} stands where the template puts no answer: set it around the assistant's content",
    NO_REASONING: "use data with reasoning, or turn thinking off in target.chat_template_kwargs",
    TOO_LONG: "allow more tokens with --max-length",
}
"""What to do where a reason leaves nothing."""
AHEAD = 3
"""Blocks under way for each process."""


@dataclass
class Counts:
    """What became of the rows."""

    rows: int = 0
    kept: int = 0
    duplicates: int = 0
    cached: int = 0
    samples: int = 0
    tokens: int = 0
    supervised: int = 0
    forms: Counter[str] = field(default_factory=Counter)
    rejected: Counter[str] = field(default_factory=Counter)
    repairs: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)
    lengths: Counter[int] = field(default_factory=Counter)
    """Samples by length: up to the power of two that is the key."""
    first: dict[str, str] = field(default_factory=dict)
    """Where each reason came first, and its detail."""

    def report(self) -> dict[str, Any]:
        """As JSON values, the most frequent first."""
        single = {name: value for name, value in vars(self).items() if isinstance(value, int)}
        several = {name: dict(getattr(self, name).most_common()) for name in ("forms", "rejected", "repairs", "notes")}
        lengths = {f"<={top}": count for top, count in sorted(self.lengths.items())}
        return {**single, **several, "lengths": lengths, "first": self.first}


def prepare(
    names: Sequence[str],
    orders: Orders,
    out: Path,
    progress: Progress,
    max_rejected: float = 0.05,
    jobs: int | None = None,
    cache: Path | None = None,
) -> dict[str, Any]:
    """Write samples of `names` (files, folders, globs, data sets) into the folder `out`; the report's content.

    Raises UserError: unreadable, more than `max_rejected` of the rows rejected, nothing supervised in any row.
    """
    began = time.monotonic()
    paths = found(names)
    refuse_inputs(names, [out / name for name in (SAMPLES, REJECTED, REPORT)])
    out.mkdir(parents=True, exist_ok=True)
    for stale in (SAMPLES, REPORT):
        (out / stale).unlink(missing_ok=True)
    counts, unfit = Counts(), None
    cache = cache or out / CACHE
    progress.total(sum(map(files.size, paths)), "bytes")
    progress.milestone(f"reading {len(paths)} file{'s' * (len(paths) != 1)}")
    with closing(Cache(cache, write=True)) as kept, closing(Seen()) as seen, replacing(out / REJECTED) as rejected:
        try:
            with replacing(out / SAMPLES) as samples:
                for block, done in worked(paths, orders, progress, cache, jobs):
                    kept.add((line.key, line.data) for line in done if line.fresh)
                    samples.write(_taken(block, done, seen, counts, rejected.write))
                _require(counts, max_rejected, out / REJECTED)
        except Unfit as error:
            unfit = error
    if unfit is not None:
        raise unfit
    report = {
        **counts.report(),
        "files": len(paths),
        "digest": orders.digest,
        "seconds": round(time.monotonic() - began, 3),
    }
    write_json(out / REPORT, report)
    return report


class Unfit(UserError):  # noqa: N818
    """The data were read, and are not fit to be used: rejected.jsonl says why."""


def found(names: Sequence[str]) -> list[str]:
    """All files that are meant, each once. Raises UserError."""
    if BUILTIN in names:
        raise UserError("the built-in prompts have no answers: let the target give them (eyas run, eyas regenerate)")
    return list(dict.fromkeys(path for name in names for path in expand(name)))


def worked(
    paths: Sequence[str], orders: Orders, progress: Progress, cache: Path | None, jobs: int | None
) -> Iterator[tuple[Block, list[Done]]]:
    """Each block with what became of its lines, in order, from as many processes as are useful."""
    jobs = jobs or len(os.sched_getaffinity(0))
    if jobs == 1 or sum(map(files.size, paths)) < ALONE_BYTES:
        worker = Worker(orders, cache)
        for path in paths:
            for block, read in _advancing(path):
                yield block, worker(block)
                progress.advance(read)
        return
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(jobs, context, _start, (orders, cache))
    waiting: deque[tuple[Block, int, Future[list[Done]]]] = deque()
    try:
        for path in paths:
            for block, read in _advancing(path):
                waiting.append((block, read, pool.submit(_work, block)))
                if len(waiting) >= AHEAD * jobs:
                    yield _next(waiting, progress)
        while waiting:
            yield _next(waiting, progress)
    except BrokenProcessPool as error:
        raise UserError("a process that tokenises was ended, perhaps for want of memory: use fewer (--jobs)") from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _next(waiting: deque[tuple[Block, int, Future[list[Done]]]], progress: Progress) -> tuple[Block, list[Done]]:
    block, read, future = waiting.popleft()
    done = future.result()
    progress.advance(read)
    return block, done


def _advancing(path: str) -> Iterator[tuple[Block, int]]:
    """The blocks of a file, each with how many bytes of it were read for it."""
    before = 0
    for block in files.blocks(path):
        yield block, block.done - before
        before = block.done


_worker: Worker | UserError | None = None


def _start(orders: Orders, cache: Path | None) -> None:
    """In each process, once. What interrupts the command is the parent's business."""
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        _worker = Worker(orders, cache)
    except UserError as error:
        _worker = error


def _work(block: Block) -> list[Done]:
    if isinstance(_worker, UserError):
        raise _worker
    assert _worker is not None
    return _worker(block)


def _taken(block: Block, done: Sequence[Done], seen: Seen, counts: Counts, reject: Callable[[bytes], Any]) -> bytes:
    """Count what became of a block's lines, and put the reasons down; the new samples, as lines."""
    read = [(line, *line.outcome()) for line in done]
    new = seen.new([_key(sample) for _, _, samples in read for sample in samples])
    written = []
    for line, outcome, samples in read:
        where = f"{block.name}:{line.line}"
        counts.rows += len(outcome.rows)
        counts.cached += 0 if line.fresh else len(outcome.rows)
        counts.forms.update(form for form in outcome.rows if form != "none")
        counts.repairs.update(outcome.repairs)
        counts.notes.update(outcome.notes)
        for reason, detail in outcome.rejected:
            counts.rejected[reason] += 1
            counts.first.setdefault(reason, f"{where} {detail}".rstrip())
            row = {"file": block.name, "line": line.line, "reason": reason, "detail": detail}
            reject(json.dumps(row, ensure_ascii=False).encode() + b"\n")
        kept = [pair for pair in zip(samples, outcome.lengths, strict=True) if _key(pair[0]) in new]
        new.difference_update(_key(sample) for sample, _ in kept)
        useful = len(outcome.rows) - len(outcome.rejected)
        counts.kept += useful if kept else 0
        counts.duplicates += 0 if kept else useful
        source = json.dumps(where).encode()
        for sample, (tokens, supervised) in kept:
            written.append(sample + b',"source":' + source + b"}\n")
            counts.samples += 1
            counts.tokens += tokens
            counts.supervised += supervised
            counts.lengths[1 << (tokens - 1).bit_length()] += 1
    return b"".join(written)


def _key(sample: bytes) -> bytes:
    """The key of a sample's line, which begins `{"key":"`."""
    return bytes.fromhex(sample[8:40].decode())


def _require(counts: Counts, max_rejected: float, rejected: Path) -> None:
    """Raises Unfit: no row, none that is supervised, too many rejected."""
    if not counts.rows:
        raise Unfit("the data hold no rows")
    lost = counts.rejected.total()
    if not counts.samples:
        reason = counts.rejected.most_common(1)[0][0]
        raise Unfit(
            f"no token of any row is supervised: {reason}, {counts.rejected[reason]} times, first at "
            f"{counts.first[reason]}; {HINTS.get(reason, 'mend the data')}; all of them are in {rejected}"
        )
    if lost > max_rejected * counts.rows:
        each = ", ".join(f"{reason} {count}" for reason, count in counts.rejected.most_common(3))
        raise Unfit(
            f"{lost} of {counts.rows} rows cannot be used, more than {max_rejected:.1%} ({each}); they are in "
            f"{rejected}: mend them, or allow more with --max-rejected (data.max_rejected)"
        )
