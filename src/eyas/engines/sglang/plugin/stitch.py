"""Which rows of a forward pass belong to which request, and whether a request is complete.

A batch holds the chunks of several requests one behind another; what stands behind their sum is padding (a chunk of 44
tokens came with 48 rows). A request's chunks come in order, each with the number of tokens computed before it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from eyas.engines.sglang.plugin.protocol import Wanted


@dataclass(frozen=True)
class Chunk:
    """Rows `row` to `row + count` of a pass are tokens `prefix` to `prefix + count` of a captured request."""

    wanted: Wanted
    row: int
    prefix: int
    count: int


def chunks(rids: Sequence[str], prefixes: Sequence[int], counts: Sequence[int]) -> Iterator[Chunk]:
    """The captured requests' chunks of a pass. Rows count by the running sum over *all* requests [sglang 32089]."""
    row = 0
    for rid, prefix, count in zip(rids, prefixes, counts):  # noqa: B905 (Python 3.9 servers)
        wanted = Wanted.of(rid) if isinstance(rid, str) else None
        if wanted is not None and count > 0:
            yield Chunk(wanted, row, prefix, count)
        row += count


def follow(chunk: Chunk, covered: int) -> str:
    """Why a chunk cannot follow `covered` rows; empty if it can. A chunk from 0 on starts it anew (retraction)."""
    if chunk.prefix > covered:
        if covered == 0:
            return (
                f"its first {chunk.prefix} tokens came from the prefix cache, so their states were never computed: "
                "give each request an extra_key of its own, or start the server with --disable-radix-cache"
            )
        return f"rows {covered} to {chunk.prefix} never came"
    if chunk.prefix + chunk.count > chunk.wanted.tokens:
        return f"{chunk.prefix + chunk.count} rows came for a request of {chunk.wanted.tokens} tokens"
    return ""
