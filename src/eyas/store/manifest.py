"""The manifest: what a store holds. It is written last, so a folder without one is no store."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from eyas.capture.contract import Contract
from eyas.errors import UserError
from eyas.files import read_json, write_atomic

FORMAT = 1
NAME = "manifest.json"


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
    lengths: list[int]
    """Tokens of each sample, so that batches can be planned without touching the shards."""


@dataclass(frozen=True)
class Quarantined:
    """A sample that failed its proofs and is not in the store."""

    key: str
    reason: str


@dataclass(frozen=True)
class Manifest:
    """What `manifest.json` holds."""

    contract: Contract
    shards: list[ShardEntry]
    quarantined: list[Quarantined]


def write(folder: Path, manifest: Manifest) -> None:
    """Write `manifest.json`, atomically; the lists of lengths stay on one line."""
    value = {
        "format": FORMAT,
        "contract": manifest.contract.to_dict(),
        "shards": [dataclasses.asdict(shard) for shard in manifest.shards],
        "quarantined": [dataclasses.asdict(sample) for sample in manifest.quarantined],
    }
    write_atomic(folder / NAME, json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False) + "\n")


def read(folder: Path) -> Manifest:
    """Read and check `manifest.json`. Raises UserError: absent, damaged, of another format."""
    path = folder / NAME
    if not path.is_file():
        raise UserError(f"{folder}: no feature store ({NAME} is missing, so its capture did not finish): capture again")
    value = read_json(path)
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        version = value.get("format") if isinstance(value, dict) else None
        raise UserError(f"{path}: store format {version!r}, this eyas reads {FORMAT}: use the eyas that wrote it")
    try:
        contract, shards, quarantined = value["contract"], value["shards"], value["quarantined"]
        manifest = Manifest(
            contract=Contract.from_dict(contract, str(path)),
            shards=[ShardEntry(**shard) for shard in shards],
            quarantined=[Quarantined(**sample) for sample in quarantined],
        )
        whole = all(len(shard.lengths) == shard.samples for shard in manifest.shards)
        whole = whole and all(sum(shard.lengths) == shard.tokens for shard in manifest.shards)
    except (KeyError, TypeError) as error:
        raise UserError(f"{path}: damaged ({error}): restore it or capture again") from error
    if not whole:
        raise UserError(f"{path}: damaged (lengths and counts of a shard differ): restore it or capture again")
    return manifest
