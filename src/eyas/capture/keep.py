"""What both capture steps do in the end: proven shards become a split's store, and are counted."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from eyas.capture.contract import Contract
from eyas.capture.proofs import Proofs, add_counts
from eyas.config import Store
from eyas.store import store, tend
from eyas.store.codec import FP8
from eyas.store.manifest import Quarantined
from eyas.store.shard import Shard
from eyas.store.writer import write


def nothing() -> dict[str, Any]:
    """The result of a capture step, to which splits are added."""
    return {"samples": 0, "tokens": 0, "supervised": 0, "bytes": 0, "quarantined": 0, "proofs": {}}


def stored(config: Store, captured: torch.dtype) -> torch.dtype:
    """The dtype of training states in the store."""
    return FP8 if config.codec == "fp8" else captured


def recoded(shards: Sequence[Shard], folder: Path, dtype: torch.dtype) -> list[Shard]:
    """The shards with their states in `dtype`, in `folder`; `last` only where it is supervised. A later attempt goes on
    with those that are there."""
    folder.mkdir(exist_ok=True)
    made = []
    for part in shards:
        path = folder / part.path.name
        if not path.exists():
            write(path, [part.sample(i) for i in range(len(part))], dtype, complete=False)
        made.append(Shard(path))
    return made


def without(shards: Sequence[Shard], keys: set[str], folder: Path) -> list[Shard]:
    """The shards less some samples: one that holds such a sample is written anew into `folder`, or left out."""
    kept = []
    for part in shards:
        if keys.isdisjoint(part.keys):
            kept.append(part)
            continue
        folder.mkdir(exist_ok=True)
        if rest := tend.without(part, keys, folder / part.path.name):
            kept.append(rest)
    return kept


def add_store(
    result: dict[str, Any], folder: Path, contract: Contract, shards: Sequence[Shard], failed: Sequence[Quarantined]
) -> None:
    """Make `folder` the store of these shards and add it to `result`."""
    store.create(folder, contract, [shard.path for shard in shards], failed)
    made = store.FeatureStore.open(folder)
    result["samples"] += len(made)
    result["tokens"] += made.tokens
    result["supervised"] += made.supervised
    result["bytes"] += sum(shard.bytes for shard in shards)
    result["quarantined"] += len(failed)


def add_proofs(result: dict[str, Any], proofs: Proofs) -> None:
    """Add the counts of proofs to `result`."""
    for name, count in proofs.counts().items():
        add_counts(result["proofs"].setdefault(name, {"checked": 0, "failed": 0, "worst": None}), count)
