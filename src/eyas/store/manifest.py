"""The manifest: what a store holds. It is written last, so a folder without one is no store.

`manifest.json` names the shards with the digest of their heads, which hold those of the samples. The length of every
sample stands apart, in `index-<digest>.safetensors`, so that opening a store takes as long with ten samples as with ten
million. What the manifest does not name is no part of the store: to replace it is to change all of it at once.
"""

import dataclasses
import json
import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from eyas.capture.contract import Contract
from eyas.digests import digest_bytes, digest_json
from eyas.errors import UserError
from eyas.files import read_json, write_atomic

FORMAT = 2
NAME = "manifest.json"
PARTS = ("shard-*.safetensors", "index-*.safetensors")
"""The files of a store beside its manifest."""
REMEDY = "restore it or capture again"


@dataclass(frozen=True)
class ShardEntry:
    """One shard of a store."""

    file: str
    bytes: int
    samples: int
    tokens: int
    supervised: int
    """Answer tokens."""
    digest: str
    """`Shard.digest`."""


@dataclass(frozen=True)
class Quarantined:
    """A sample that failed its proofs, or was found damaged, and is not in the store: its tombstone."""

    key: str
    reason: str


@dataclass(frozen=True)
class Manifest:
    """What `manifest.json` holds. `index`: digest of the index file."""

    contract: Contract
    shards: list[ShardEntry]
    quarantined: list[Quarantined]
    index: str

    @property
    def index_file(self) -> str:
        """Name of the index file."""
        return f"index-{self.index[:8]}.safetensors"


def write(
    folder: Path, contract: Contract, shards: list[ShardEntry], quarantined: list[Quarantined], lengths: list[int]
) -> None:
    """Write the index, then `manifest.json`, each atomically; then delete what an earlier manifest named.

    `lengths`: tokens of every sample, in order.
    """
    index = safetensors.torch.save({"lengths": torch.tensor(lengths, dtype=torch.int32)})
    manifest = Manifest(contract, shards, quarantined, digest_bytes(index))
    write_atomic(folder / manifest.index_file, index)
    value: dict[str, Any] = {
        "format": FORMAT,
        "contract": contract.to_dict(),
        "shards": [dataclasses.asdict(shard) for shard in shards],
        "quarantined": [dataclasses.asdict(sample) for sample in quarantined],
        "index": manifest.index,
    }
    value["digest"] = digest_json(value)
    write_atomic(folder / NAME, json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False) + "\n")
    named = {manifest.index_file, *(shard.file for shard in shards)}
    for pattern in PARTS:
        for path in folder.glob(pattern):
            if path.name not in named:
                path.unlink()


def read(folder: Path) -> Manifest:
    """Read and check `manifest.json`. Raises UserError: absent, damaged, of another format."""
    path = folder / NAME
    if not path.is_file():
        raise UserError(f"{folder}: no feature store ({NAME} is missing, so its capture did not finish): capture again")
    value = read_json(path)
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        version = value.get("format") if isinstance(value, dict) else None
        raise UserError(
            f"{path}: store format {version!r}, this eyas reads {FORMAT}: use the eyas that wrote it, or capture again"
        )
    try:
        if value.pop("digest") != digest_json(value):
            raise UserError(f"{path}: damaged (its digest differs): {REMEDY}")
        return Manifest(
            contract=Contract.from_dict(value["contract"], str(path)),
            shards=[ShardEntry(**shard) for shard in value["shards"]],
            quarantined=[Quarantined(**sample) for sample in value["quarantined"]],
            index=value["index"],
        )
    except (KeyError, TypeError) as error:
        raise UserError(f"{path}: damaged ({error}): {REMEDY}") from error


def read_index(path: Path, samples: int) -> torch.Tensor:
    """Lengths int32 [samples], memory-mapped. Raises UserError: absent, damaged, of another number of samples."""
    try:
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        start = 8 + int.from_bytes(mapped[:8], "little")
        header = json.loads(mapped[8:start]) if start <= len(mapped) else {}
        if header.get("lengths") != {"dtype": "I32", "shape": [samples], "data_offsets": [0, 4 * samples]}:
            raise UserError(f"{path}: damaged, or of another store: {REMEDY}")
        if start + 4 * samples != len(mapped):
            raise UserError(f"{path}: cut short: {REMEDY}")
        if not samples:
            return torch.empty(0, dtype=torch.int32)
        return torch.frombuffer(mapped, dtype=torch.uint8)[start:].view(torch.int32)
    except (OSError, ValueError, AttributeError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path}: cannot read the index ({error}): {REMEDY}") from error
