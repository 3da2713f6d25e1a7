"""Data files -> blocks of numbered lines, each a JSON value or a line of text; first stage of the corpus.

Nothing here looks into a row: a block is cut off the file and sent to whoever parses it (`rows`), so that several
processes can share one file, and memory does not grow with it. Parquet, CSV and data sets become lines of JSON. Bytes
that are no UTF-8 stay as they are: their row is rejected where it is parsed, and no other.
"""

import bz2
import codecs
import contextlib
import csv
import gzip
import importlib
import itertools
import json
import lzma
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from eyas.datafiles import HUB, kind
from eyas.errors import UserError

BLOCK = 1 << 18
LOOK = 1 << 20
"""Bytes at the start of a file by which its kind of JSON is told."""
PARQUET_ROWS = 1000
LONGEST_WORD = 10
"""Characters at the end of a text that may be the beginning of `false` or of an escape."""
SPACE = " \t\r\n"


@dataclass(frozen=True)
class Block:
    """Consecutive lines of one file."""

    name: str
    text: bool
    """Lines are texts, not JSON values."""
    lines: bytes | list[tuple[int, bytes]]
    """A stretch of the file, or numbered lines."""
    first: int
    """Number of the first line, where `lines` is a stretch."""
    done: int
    """Bytes of the file that are read after this block, as they lie on the disk."""

    def numbered(self) -> Iterator[tuple[int, bytes]]:
        """The lines that are not blank, without their ends, each with its number (from 1)."""
        if isinstance(self.lines, list):
            yield from self.lines
            return
        # Lines end with \n only: texts may hold other Unicode line separators.
        for number, line in enumerate(self.lines.split(b"\n"), self.first):
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            if stripped := line.strip(b" \t\r"):
                yield number, stripped


def blocks(name: str) -> Iterator[Block]:
    """The blocks of a file, or of a data set `hf:owner/name[:split]`, in order.

    Raises UserError: unreadable, damaged as a whole, or a package that is needed is missing.
    """
    if name.startswith(HUB):
        yield from _batched(name, _hub(name.removeprefix(HUB)))
        return
    form = kind(name)
    try:
        if form == "parquet":
            yield from _parquet(name)
            return
        with Path(name).open("rb") as raw, _unpacked(name, raw) as file:
            if form == "csv":
                yield from _batched(name, _csv(name, file), raw)
            elif form == "text":
                yield from _stretches(name, file, raw, True)
            else:
                yield from _json(name, file, raw)
    except (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError) as error:
        raise UserError(f"{name}: damaged or cut short ({error}); fetch or pack it again") from error
    except OSError as error:
        raise UserError(f"{name}: cannot read the data ({error.strerror or error})") from error


def size(name: str) -> int:
    """Bytes of a file; 0 for a data set."""
    return 0 if name.startswith(HUB) else Path(name).stat().st_size


def _unpacked(name: str, raw: IO[bytes]) -> Any:
    """The content of a file that may be packed."""
    match Path(name).suffix.lower():
        case ".gz":
            return gzip.open(raw, "rb")
        case ".bz2":
            return bz2.open(raw, "rb")
        case ".xz":
            return lzma.open(raw, "rb")
        case ".zst":
            return _extra("zstandard", name).open(raw, "rb")
    return contextlib.nullcontext(raw)


def _extra(module: str, name: str, extra: str = "data") -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(f"{name}: needs the package {module}: pip install 'eyas[{extra}]'") from error


def _stretches(name: str, file: IO[bytes], raw: IO[bytes], text: bool, head: bytes = b"") -> Iterator[Block]:
    """Whole lines, as they lie in the file."""
    line, rest = 1, b""
    pieces = (head[start : start + BLOCK] for start in range(0, len(head), BLOCK))
    for piece in itertools.chain(pieces, iter(lambda: file.read(BLOCK), b"")):
        data = rest + piece
        cut = data.rfind(b"\n") + 1
        rest = data[cut:]
        if cut:
            yield Block(name, text, data[:cut], line, raw.tell())
            line += data.count(b"\n", 0, cut)
    if rest:
        yield Block(name, text, rest, line, raw.tell())


def _json(name: str, file: IO[bytes], raw: IO[bytes]) -> Iterator[Block]:
    """JSON lines, one array, or values over several lines each: told by the content, whatever the file is called."""
    head = file.read(LOOK)
    first = head.removeprefix(codecs.BOM_UTF8).lstrip().partition(b"\n")[0].strip()
    if first == b"{" or (first.startswith(b"[") and not _is_json(first)):
        yield from _batched(name, _values(name, head, file, array=first != b"{"), raw)
    else:
        yield from _stretches(name, file, raw, False, head)


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _values(name: str, head: bytes, file: IO[bytes], array: bool) -> Iterator[tuple[int, bytes]]:
    """JSON values one after another, with the line on which each begins; never more of the file in memory than one.

    A value that the end of the file cuts short is given as it is, to be rejected. Raises UserError: damaged before.
    """
    decoder, scan = codecs.getincrementaldecoder("utf-8-sig")("surrogateescape"), json.JSONDecoder()
    buffer, at, line, ended = decoder.decode(head), 0, 1, False
    between = SPACE + "," if array else SPACE
    opened = not array
    while True:
        start = at
        while at < len(buffer) and buffer[at] in between:
            at += 1
        if not opened and at < len(buffer):
            at, opened = at + 1, True  # the bracket
            line += buffer.count("\n", start, at)
            continue
        line += buffer.count("\n", start, at)
        if array and buffer[at : at + 1] == "]":
            return
        try:
            if at == len(buffer):
                raise ValueError("nothing left")
            _, end = scan.raw_decode(buffer, at)
            if end == len(buffer) and not ended:
                raise ValueError("a number may go on")
        except (ValueError, RecursionError) as error:
            if ended and at == len(buffer):
                return
            if _damaged(error, buffer):
                raise UserError(
                    f"{name}:{line}: damaged JSON ({error}); mend it, or make it JSON lines, of which only bad lines "
                    "are left out"
                ) from error
            if ended:
                yield line, _bytes(buffer[at:])
                return
            more = file.read(max(BLOCK, len(buffer) - at))
            ended = not more
            buffer, at = buffer[at:] + decoder.decode(more, ended), 0
            continue
        yield line, _bytes(buffer[at:end])
        line += buffer.count("\n", at, end)
        at = end


def _damaged(error: Exception, buffer: str) -> bool:
    """Is it more than a value that goes on behind the end of `buffer`?"""
    if not isinstance(error, json.JSONDecodeError):
        return isinstance(error, RecursionError)
    return not error.msg.startswith("Unterminated string") and error.pos + LONGEST_WORD < len(buffer)


def _csv(name: str, file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """Rows of a table with a header, as JSON objects; a cell that holds a JSON list or object becomes one."""
    text = codecs.iterdecode(file, "utf-8-sig", "surrogateescape")
    csv.field_size_limit(LOOK * 64)
    tabs = ".tsv" in Path(name).suffixes
    reader = csv.DictReader(text, delimiter="\t" if tabs else ",", restkey="", strict=True)
    try:
        before = reader.line_num if reader.fieldnames else 0  # the header may take several lines
        for row in reader:
            line, before = before + 1, reader.line_num
            yield line, _bytes(json.dumps({key: _cell(cell) for key, cell in row.items()}, ensure_ascii=False))
    except csv.Error as error:
        raise UserError(f"{name}:{reader.line_num}: not a table ({error}); save it as CSV again") from error


def _cell(cell: Any) -> Any:
    if isinstance(cell, str) and cell[:1] in ("[", "{"):
        try:
            return json.loads(cell)
        except (ValueError, RecursionError):
            return cell
    return cell


def _parquet(name: str) -> Iterator[Block]:
    """Blocks of rows; the share of rows stands for the share of bytes."""
    parquet = _extra("pyarrow.parquet", name)
    try:
        with parquet.ParquetFile(name) as file:
            rows, whole = max(1, file.metadata.num_rows), size(name)
            first = 1
            for batch in file.iter_batches(PARQUET_ROWS):
                lines = [(first + i, _row(row)) for i, row in enumerate(batch.to_pylist())]
                first += len(lines)
                yield Block(name, False, lines, 0, whole * (first - 1) // rows)
    except _extra("pyarrow", name).ArrowException as error:
        raise UserError(f"{name}: not a whole Parquet file ({str(error).splitlines()[0]}); fetch it again") from error


def _hub(name: str) -> Iterator[tuple[int, bytes]]:
    """Rows of a data set, streamed; of the split `train` unless another is named."""
    datasets = _extra("datasets", name, "hub")
    wanted, _, split = name.partition(":")
    try:
        rows = datasets.load_dataset(wanted, split=split or "train", streaming=True)
        for number, row in enumerate(rows, 1):
            yield number, _row(row)
    except Exception as error:
        raise UserError(f"{name}: neither a file nor a data set that can be read ({error})") from error


def _row(row: dict[str, Any]) -> bytes:
    return json.dumps(row, default=str).encode()


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _batched(name: str, lines: Iterable[tuple[int, bytes]], raw: IO[bytes] | None = None) -> Iterator[Block]:
    batch: list[tuple[int, bytes]] = []
    held = 0
    for number, line in lines:
        batch.append((number, line))
        held += len(line)
        if held >= BLOCK:
            yield Block(name, False, batch, 0, raw.tell() if raw else 0)
            batch, held = [], 0
    if batch:
        yield Block(name, False, batch, 0, raw.tell() if raw else 0)
