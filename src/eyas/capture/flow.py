"""From replies to shards: captures are proven on threads while the server computes the next ones."""

import contextlib
import json
import os
import threading
import time
import uuid
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import xxhash

from eyas.capture.proofs import Proofs, require_share
from eyas.engines.device import usable_cores
from eyas.engines.sglang import capturefile, client
from eyas.engines.sglang.client import Lost, Reply, Request
from eyas.engines.sglang.info import ServerInfo
from eyas.engines.sglang.plugin.protocol import Wanted
from eyas.engines.sglang.server import Endpoint
from eyas.engines.target import TargetInfo
from eyas.errors import UserError
from eyas.files import read_json, write_json
from eyas.progress import Progress
from eyas.store.filling import Filling
from eyas.store.layout import Place
from eyas.store.manifest import Quarantined
from eyas.store.shard import Sample, Shard

SHARD_SAMPLES = 4096
"""Most samples of a shard, whatever their size: it is their list that is read when one of them is wanted."""
WRITERS = 2
"""Groups written at once: one thread alone writes not much faster than a large server captures."""
GROUP, GROUP_BYTES = 16, 256 << 20
"""Samples whose head products are computed together: the head is read once for all of them."""
QUARANTINED, COUNTS = "quarantined.jsonl", "proofs.json"


@contextlib.contextmanager
def forgiving(out: Path) -> Iterator[None]:
    """Forget the quarantine where a UserError stops the step: once that is mended, its samples are asked for anew.

    What they failed is no longer counted either.
    """
    try:
        yield
    except UserError:
        if (out / QUARANTINED).exists() and (out / COUNTS).exists():
            counts = read_json(out / COUNTS)
            for count in counts.values():
                count |= {"checked": count["checked"] - count["failed"], "failed": 0}
            write_json(out / COUNTS, counts)
        (out / QUARANTINED).unlink(missing_ok=True)
        raise


@dataclass(frozen=True)
class Want:
    """A sample to be captured: ids of which the first `prompt` are no answer."""

    split: str
    key: str
    ids: list[int]
    prompt: int


def place(want: Want) -> Place:
    """What of a sample is kept: of a training one, `last` only where an answer token follows."""
    tokens = len(want.ids)
    return Place(want.key, tokens, tokens if want.split == "heldout" else tokens - want.prompt)


@dataclass(frozen=True, eq=False)
class Proven:
    """A sample that was looked at: whole and right, or with the reason why not."""

    want: Want
    path: Path
    sample: Sample | None
    reason: str | None
    gone: bool = False
    """Its file is no longer there, as after the death of a server that eyas started: lost, not wrong."""


class Flow:
    """One step's captures in `out`, which may hold those of an earlier attempt.

    `stored`: by split, the dtype of the states in the store. `quarantined`: by split, what failed. `seconds`: `server`
    is the time from the first request to the last reply, `proofs` and `write` are sums over threads. `tokens`: captured
    by this attempt.
    """

    def __init__(
        self,
        out: Path,
        ends: Sequence[Endpoint],
        about: ServerInfo,
        target: TargetInfo,
        layers: tuple[int, int, int],
        proofs: Proofs,
        stored: dict[str, torch.dtype],
        limit: float,
        shard_bytes: int,
    ) -> None:
        self.about, self.target = about, target
        self._out, self._ends, self._layers, self._proofs = out, list(ends), layers, proofs
        self.stored, self._limit, self._shard_bytes = stored, limit, shard_bytes
        self._itemsize = max(dtype.itemsize for dtype in stored.values())
        self._filling = {
            split: Filling(out / "shards", split, target.hidden_size, dtype) for split, dtype in stored.items()
        }
        self.quarantined: dict[str, list[Quarantined]] = {split: [] for split in stored}
        self.seconds = {"server": 0.0, "proofs": 0.0, "write": 0.0, "recapture": 0.0}
        self.tokens = 0
        self._lock, self._counting = threading.Lock(), threading.Lock()
        self._total = dict.fromkeys(stored, 0)
        self._roots = [end.root for end in ends if end.root is not None]
        # What is not deleted yet stays below what the client allows, or both would wait for each other.
        room = min(map(client.space, self._roots))
        self._waiting_bytes = room // 4
        self._group_bytes = min(GROUP_BYTES, room // 16)
        # One step's files are told from another's, and this attempt's from an earlier one's, by their names.
        self._ours = xxhash.xxh3_64_hexdigest(str(out.absolute()).encode())[:8]
        self._attempt = uuid.uuid4().hex[:8]

    def resume(self, wants: Sequence[Want]) -> None:
        """Take over what earlier attempts proved: whole shards by content, and what they quarantined."""
        (self._out / "shards").mkdir(exist_ok=True)
        self._sweep()
        wanted = {want.key for want in wants}
        for split in self._total:
            self._total[split] = sum(want.split == split for want in wants)
            self._filling[split].resume(wanted.__contains__)
        log = self._out / QUARANTINED
        for line in log.read_text(encoding="utf-8").splitlines() if log.exists() else []:
            try:
                row = json.loads(line)
                self.quarantined[row["split"]].append(Quarantined(row["key"], row["reason"]))
            except (ValueError, KeyError):
                continue  # cut short when the attempt was ended; that sample is captured again
        if (self._out / COUNTS).exists():
            self._proofs.add(read_json(self._out / COUNTS))

    def left(self, wants: Sequence[Want]) -> list[Want]:
        """Those that are neither kept nor quarantined yet."""
        kept: set[str] = set().union(*(filling.kept for filling in self._filling.values()))
        kept |= {one.key for failed in self.quarantined.values() for one in failed}
        return [want for want in wants if want.key not in kept]

    @property
    def shards(self) -> dict[str, list[Shard]]:
        """The finished shards, by split."""
        return {split: filling.shards for split, filling in self._filling.items()}

    def plan(self, left: Sequence[Want]) -> int:
        """Give each sample its place in a shard; returns the bytes that they will take on the disk."""
        total = 0
        for split, filling in self._filling.items():
            places = [place(want) for want in left if want.split == split]
            total += filling.bytes(places)
            filling.plan(places, self._shard_bytes, SHARD_SAMPLES)
        return total

    def request(self, want: Want, kind: str = "sample") -> Request:
        """The request for a sample."""
        return Request(Wanted(f"{self._ours}-{self._attempt}-{kind}-{want.key}", len(want.ids)), want.ids)

    def capture(self, wants: Sequence[Want], concurrency: int, progress: Progress) -> None:
        """Capture and prove all samples that are neither kept nor quarantined yet.

        What is lost on the way is asked for once more at the end. Raises UserError: too many failed; ServerDied: then
        what was proven is kept.
        """
        left = self.left(wants)
        self.plan(left)
        progress.total(
            sum(len(w.ids) for w in wants), "tokens", sum(len(w.ids) for w in wants) - sum(len(w.ids) for w in left)
        )
        progress.milestone("capturing")
        try:
            lost = self._pass(left, concurrency, progress)
            if lost:
                progress.milestone(f"capturing {len(lost)} lost samples again ({lost[0][1]})")
                lost = self._pass([want for want, _ in lost], concurrency, progress)
            for want, reason in lost:  # not written down: a later attempt asks for them anew
                self.quarantined[want.split].append(Quarantined(want.key, f"lost: {reason}"))
            for filling in self._filling.values():
                filling.finish()
        finally:
            for filling in self._filling.values():
                filling.close()
            self._sweep()

    def _pass(self, wants: Sequence[Want], concurrency: int, progress: Progress) -> list[tuple[Want, str]]:
        """Capture and prove; returns what was lost."""
        by_name = {self.request(want).wanted.name: want for want in wants}
        lost: list[tuple[Want, str]] = []
        group: list[tuple[Want, Reply]] = []
        waiting: deque[Future[list[Proven]]] = deque()
        cores = usable_cores()
        began = time.perf_counter()
        replies = client.capture(
            self._ends,
            map(self.request, wants),
            info=self.about,
            concurrency=concurrency,
            vocab_size=self.target.vocab_size,
        )
        with (
            ThreadPoolExecutor(cores, "proofs") as provers,
            ThreadPoolExecutor(WRITERS, "shards") as writer,
            contextlib.closing(replies),
        ):
            writing: deque[Future[None]] = deque()
            try:
                for reply in replies:
                    want = by_name[reply.request.wanted.name]
                    progress.advance(len(want.ids))
                    if isinstance(reply, Lost):
                        lost.append((want, reply.reason))
                        continue
                    self.seconds["server"] += time.perf_counter() - began
                    began = time.perf_counter()
                    self.tokens += len(want.ids)
                    group.append((want, reply))
                    if len(group) == GROUP or self._bytes(w for w, _ in group) >= self._group_bytes:
                        waiting.append(provers.submit(self._prove, group))
                        group = []
                    while waiting and (waiting[0].done() or self._crowded(len(waiting), cores)):
                        self._take(waiting.popleft().result(), lost, writer, writing)
                if group:
                    waiting.append(provers.submit(self._prove, group))
                while waiting:
                    self._take(waiting.popleft().result(), lost, writer, writing)
            finally:
                while writing:
                    writing.popleft().result()
                self._write_counts()
        return lost

    def _crowded(self, groups: int, cores: int) -> bool:
        return groups > 2 * cores or groups * self._group_bytes > self._waiting_bytes

    def _prove(self, group: list[tuple[Want, Reply]]) -> list[Proven]:
        """Read and prove some captures; on a thread."""
        torch.set_num_threads(1)
        began = time.perf_counter()
        read = [self._read(want, reply) for want, reply in group]
        self._proofs.look_ahead([one.sample for one in read if one.sample is not None])
        proven = []
        for one in read:
            if one.sample is not None:
                one = replace(one, reason=self._proofs.check(one.sample))
            proven.append(one)
        with self._lock:
            self.seconds["proofs"] += time.perf_counter() - began
        return proven

    def _read(self, want: Want, reply: Reply) -> Proven:
        try:
            captured = capturefile.read(reply.path, reply.path.parent)
        except UserError as error:
            return Proven(want, reply.path, None, f"file: {error}", gone=not os.path.lexists(reply.path))
        ids = torch.tensor(want.ids)
        if not torch.equal(captured.ids, ids):
            return Proven(want, reply.path, None, "ids: the forward pass saw other ids than were sent")
        if captured.layers != self._layers:
            return Proven(want, reply.path, None, f"layers: captured were {captured.layers}, wanted {self._layers}")
        answer = torch.arange(len(ids)) >= want.prompt
        # A greedy answer is the target's own choice at each place; what follows the last one, the server has just said.
        choice = torch.full((len(ids),), -1)
        choice[:-1][answer[1:]] = ids[1:][answer[1:]]
        choice[-1] = reply.token
        return Proven(want, reply.path, Sample(want.key, ids, answer, captured.aux, captured.last, choice), None)

    def _take(
        self,
        proven: list[Proven],
        lost: list[tuple[Want, str]],
        writer: ThreadPoolExecutor,
        writing: deque[Future[None]],
    ) -> None:
        """Sort proven captures into shards, quarantine and `lost`, and wait for what was written before.

        Raises UserError as soon as more of a split have failed than may fail of all its samples.
        """
        right = [one for one in proven if one.reason is None and not one.gone]
        writing.append(writer.submit(self._write, right))
        for one in proven:
            split = one.want.split
            if one.gone:
                lost.append((one.want, f"its file is gone: {one.path}"))
            elif one.reason is not None:
                self._fail(one.want, one.reason)
                one.path.unlink(missing_ok=True)
                require_share(self.quarantined[split], self._total[split], self._limit)
        while len(writing) > WRITERS:
            writing.popleft().result()

    def _write(self, right: list[Proven]) -> None:
        """Make samples durable, then delete their captures; on a thread."""
        began = time.perf_counter()
        for split, filling in self._filling.items():
            filling.put([one.sample for one in right if one.sample is not None and one.want.split == split])
        for one in right:
            one.path.unlink(missing_ok=True)
        self._write_counts()
        with self._lock:
            self.seconds["write"] += time.perf_counter() - began

    def _fail(self, want: Want, reason: str) -> None:
        self.quarantined[want.split].append(Quarantined(want.key, reason))
        self._filling[want.split].settle(want.key)
        with (self._out / QUARANTINED).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"split": want.split, "key": want.key, "reason": reason}) + "\n")
        self._write_counts()

    def _write_counts(self) -> None:
        with self._counting:
            write_json(self._out / COUNTS, self._proofs.counts())

    def _bytes(self, wants: Iterable[Want]) -> int:
        return sum(len(want.ids) for want in wants) * 4 * self.target.hidden_size * self._itemsize

    def _sweep(self) -> None:
        """Delete captures of this step that nobody will read, an ended attempt's among them."""
        for root in self._roots:
            client.sweep(root, f"{self._ours}-")
