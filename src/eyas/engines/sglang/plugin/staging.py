"""States on their way from the device to a file.

Rows are packed on the device, copied on a side stream into one of a bounded number of pinned buffers, and written by a
few threads, which is where all waiting happens that can be avoided. Where files cannot keep up, the buffers run out and
`put` holds the server's next step: replies come later, nothing is lost. Where nothing moves for `hold_seconds` (a full
disk that nobody empties), captures are given up with their reason, and the server goes on.
"""

import errno
import queue
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from eyas.engines.sglang.plugin.layout import CaptureFile
from eyas.engines.sglang.plugin.protocol import Orders, Wanted
from eyas.engines.sglang.plugin.stitch import Chunk, follow

BUFFER_BYTES = 32 << 20
WRITERS = 3
SWITCH_SECONDS = 2e-4
RETRY_SECONDS = 0.1
FORGET_SECONDS = 900.0
"""A request of which nothing more came for so long was aborted."""
FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(eq=False)
class Open:
    """A request of which at least one chunk has come."""

    wanted: Wanted
    file: CaptureFile
    covered: int = 0
    """Rows that have come."""
    pending: int = 0
    """Pieces on their way to the file."""
    problem: str = ""
    superseded: bool = False
    closed: bool = False
    touched: float = field(default_factory=time.monotonic)


@dataclass
class Piece:
    """Some rows of a request in a buffer: aux, last and ids one behind another."""

    of: Open
    row: int
    buffer: torch.Tensor
    sizes: tuple[int, ...]
    copied: Any
    """The event after which the buffer holds them; None on a processor."""


class Staging:
    """Takes rows of captured requests and makes their files.

    `device`, `dtype`, `hidden`, `layers` describe the states; `rank` is the tensor-parallel rank.
    """

    def __init__(
        self,
        orders: Orders,
        layers: "tuple[int, ...]",
        hidden: int,
        dtype: torch.dtype,
        device: torch.device,
        rank: int = 0,
    ) -> None:
        self._root, self._hold, self._rank = orders.root, orders.hold_seconds, rank
        self._layers, self._hidden, self._dtype = layers, hidden, dtype
        row_bytes = (len(layers) + 1) * hidden * dtype.itemsize
        cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if cuda else None
        # Ranks that only take part in comparisons need little.
        count = max(2, orders.staging_bytes // BUFFER_BYTES) if rank == 0 else 2
        # Pinned memory is given out in powers of two: a buffer fills one.
        size = max(BUFFER_BYTES, row_bytes + 4)
        self._rows = size // (row_bytes + 4)
        self._free: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()
        for _ in range(count):
            self._free.put(torch.empty(size, dtype=torch.uint8, pin_memory=cuda))
        self._pieces: queue.SimpleQueue[Piece] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._open: dict[str, Open] = {}
        self._full_since: float | None = None
        """Since when no file takes anything; None while they do."""
        self._stuck = False
        """Buffers ran out for `hold_seconds`, and none has come back since."""
        # A server with nothing to do spins in Python. By default the writers would wait 5 ms each time that they need
        # its interpreter lock, in all about half a second behind the last chunk.
        sys.setswitchinterval(SWITCH_SECONDS)
        for _ in range(WRITERS if rank == 0 else 1):
            threading.Thread(target=self._work, name="eyas-capture", daemon=True).start()

    def put(
        self, chunk: Chunk, ids: torch.Tensor, aux: "list[torch.Tensor] | torch.Tensor", last: torch.Tensor
    ) -> None:
        """Take a chunk of a request out of a pass.

        `ids` [N], `aux` three [N, H] or one [N, 3H], `last` [N, H] are the whole pass's; they may be overwritten by the
        next pass. Never raises for what one request brings: that is written down as the request's failure.
        """
        request = self._request(chunk)
        if request is None:
            return
        for begin in range(0, chunk.count, self._rows):
            if request.problem:
                break
            rows = slice(chunk.row + begin, chunk.row + min(chunk.count, begin + self._rows))
            buffer = self._take()
            if buffer is None:
                request.problem = f"its states found no way into a file for {self._hold:g} s"
                break
            try:
                piece = self._copy(request, chunk.prefix + begin, rows, buffer, ids, aux, last)
            except BaseException:
                self._free.put(buffer)
                raise
            with self._lock:
                request.pending += 1
            self._pieces.put(piece)
        with self._lock:
            request.covered = max(request.covered, chunk.prefix + chunk.count)
        self._close_if_done(request)

    def unlike(self, last: torch.Tensor) -> bool:
        """Whether states are others than those that files and buffers are laid out for."""
        return last.dtype != self._dtype or last.shape[-1] != self._hidden

    def fail(self, wanted: Wanted, reason: str) -> None:
        """Write down why a request is not captured."""
        with self._lock:
            request = self._open.get(wanted.name)
            if request is not None:
                request.problem = request.problem or reason
        if request is None:
            self._say(wanted, reason)
        else:
            self._close_if_done(request)

    def _request(self, chunk: Chunk) -> "Open | None":
        """The request that a chunk belongs to; None where it cannot be captured (any more)."""
        wanted = chunk.wanted
        with self._lock:
            request = self._open.get(wanted.name)
        if request is None and chunk.prefix >= wanted.tokens:
            return None  # It was asked for more than one new token: those are no prompt.
        if request is not None and request.closed and chunk.prefix > 0:
            return None  # Given up before; its reason is written down.
        if problem := follow(chunk, request.covered if request else 0):
            self.fail(wanted, problem)
            return None
        if chunk.prefix > 0:
            assert request is not None
            request.touched = time.monotonic()
            return request
        self._forget()
        if request is not None:
            request.superseded = True
            self._close_if_done(request)
        path = wanted.partial(self._root, self._rank)
        try:
            wanted.failed(self._root).unlink(missing_ok=True)
            request = Open(wanted, CaptureFile(path, wanted, self._layers, self._hidden, self._dtype))
        except OSError as error:
            self._say(wanted, f"cannot write {path}: {error.strerror}")
            return None
        with self._lock:
            self._open[wanted.name] = request
        return request

    def _take(self) -> "torch.Tensor | None":
        try:
            return self._free.get(timeout=0.0 if self._stuck else self._hold)
        except queue.Empty:
            self._stuck = True
            return None

    def _copy(
        self,
        request: Open,
        row: int,
        rows: slice,
        buffer: torch.Tensor,
        ids: torch.Tensor,
        aux: "list[torch.Tensor] | torch.Tensor",
        last: torch.Tensor,
    ) -> Piece:
        packed = aux[rows] if isinstance(aux, torch.Tensor) else torch.cat([layer[rows] for layer in aux], -1)
        # Own copies, made in stream order: the pass's tensors are overwritten by the next one.
        sources = [packed.clone() if isinstance(aux, torch.Tensor) else packed, last[rows].clone(), ids[rows].int()]
        sizes = tuple(source.numel() * source.element_size() for source in sources)
        copied = None
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(last.device))
        with torch.cuda.stream(self._stream):
            start = 0
            for source, size in zip(sources, sizes):  # noqa: B905
                buffer[start : start + size].view(source.dtype).view(source.shape).copy_(source, non_blocking=True)
                start += size
                if self._stream is not None:
                    source.record_stream(self._stream)
            if self._stream is not None:
                copied = torch.cuda.Event()
                copied.record(self._stream)
        return Piece(request, row, buffer, sizes, copied)

    def _work(self) -> None:
        """Of a writer thread."""
        while True:
            piece = self._pieces.get()
            try:
                self._write(piece)
            except Exception as error:
                piece.of.problem = piece.of.problem or f"{type(error).__name__}: {error}"
            self._free.put(piece.buffer)
            self._stuck = False
            with self._lock:
                piece.of.pending -= 1
            self._close_if_done(piece.of)

    def _write(self, piece: Piece) -> None:
        if piece.copied is not None:
            piece.copied.synchronize()
        data = memoryview(piece.buffer.numpy())  # type: ignore[arg-type]
        while not (piece.of.problem or piece.of.superseded):
            try:
                start = 0
                for name, size in zip(("aux", "last", "ids"), piece.sizes):  # noqa: B905
                    piece.of.file.write(name, piece.row, data[start : start + size])
                    start += size
                self._full_since = None
                return
            except OSError as error:
                since = self._full_since = self._full_since or time.monotonic()
                if error.errno not in FULL or time.monotonic() > since + self._hold:
                    piece.of.problem = f"cannot write into {self._root}: {error.strerror}"
                else:
                    time.sleep(RETRY_SECONDS)

    def _close_if_done(self, request: Open) -> None:
        """Finish a request whose every row is written, or give it up if it has a problem; by whoever comes last."""
        with self._lock:
            done = request.covered >= request.wanted.tokens
            if request.pending or request.closed or not (done or request.problem or request.superseded):
                return
            request.closed = True
            # One with a problem stays, so that its later chunks are known.
            if self._open.get(request.wanted.name) is request and not request.problem:
                del self._open[request.wanted.name]
        if not (request.problem or request.superseded):
            try:
                request.file.finish(request.wanted.file(self._root, self._rank))
                return
            except OSError as error:
                request.problem = f"cannot finish the file in {self._root}: {error.strerror}"
        request.file.abandon()
        if request.problem and not request.superseded:
            self._say(request.wanted, request.problem)

    def _forget(self) -> None:
        """Give up requests that were aborted half-way."""
        limit = time.monotonic() - FORGET_SECONDS
        with self._lock:
            old = [request for request in self._open.values() if request.touched < limit]
            for request in old:
                del self._open[request.wanted.name]
        for request in old:
            request.superseded = True
            self._close_if_done(request)

    def _say(self, wanted: Wanted, reason: str) -> None:
        path: Path = wanted.failed(self._root)
        temporary = path.with_name(f".{path.name}.partial")
        try:
            try:
                temporary.write_text(f"{reason}\n", encoding="utf-8")
            except OSError:
                print(f"eyas: {wanted.name}: {reason}", flush=True)
                temporary.write_bytes(b"")  # A full disk has room for an empty file, which says as much.
            temporary.replace(path)
        except OSError as error:
            print(f"eyas: cannot write {path}: {error.strerror}", flush=True)
