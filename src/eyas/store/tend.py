"""What can be done with finished stores: examine, repair, merge, remove. Behind the `eyas store` commands.

Each ends in one atomic act, the replacing of a manifest or the renaming of a folder: killed before, all is as it was.
"""

import shutil
import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eyas.errors import UserError
from eyas.files import fsync_folder
from eyas.progress import Progress
from eyas.store import manifest as manifests
from eyas.store.layout import Layout
from eyas.store.manifest import Quarantined
from eyas.store.shard import Shard
from eyas.store.store import FeatureStore, create, describe
from eyas.store.writer import write_columns

PADDED = 32
"""Samples of the batches that `stats` compares with."""


def find(place: Path) -> list[Path]:
    """The stores in `place`: itself, or all below it, as in a run folder. Raises UserError where there is none."""
    if (place / manifests.NAME).is_file():
        return [place]
    found = sorted({path.parent for path in place.rglob(manifests.NAME)} - {place})
    found = [folder for folder in found if not folder.name.startswith(".")]
    if not found:
        raise UserError(f"{place}: no feature store here or below ({manifests.NAME} is missing)")
    return found


def verify(folder: Path, progress: Progress) -> list[str]:
    """Read everything of a store; a line for each damaged sample and each unusable file."""
    return FeatureStore.open(folder).verify(progress)


def stats(folder: Path) -> dict[str, Any]:
    """Figures of a store: contract, counts, bytes, lengths, and what padding would have cost. Reads no states."""
    store = FeatureStore.open(folder)
    lengths = store.lengths
    size = sum(entry.bytes for entry in store.entries)
    wide = store.contract.hidden_size * 4 * (4 if store.contract.dtype == "float32" else 2)
    padded = sum(max(part) * len(part) for part in _batches(lengths, PADDED)) * wide
    return {
        "contract": store.contract.to_dict(),
        "shards": len(store.entries),
        "samples": len(store),
        "tokens": store.tokens,
        "supervised": store.supervised,
        "bytes": size,
        "bytes_per_token": round(size / max(1, store.tokens), 1),
        "lengths": {
            "shortest": min(lengths, default=0),
            "median": statistics.median(lengths) if lengths else 0,
            "longest": max(lengths, default=0),
        },
        "of_padded": round(size / max(1, padded), 4),
        "quarantined": dict(Counter(one.reason.partition(":")[0] for one in store.quarantined)),
    }


def shards(folder: Path) -> list[dict[str, Any]]:
    """The manifest's entries."""
    return [vars(entry) for entry in FeatureStore.open(folder).entries]


def samples(folder: Path) -> list[dict[str, Any]]:
    """Key, shard, tokens and digest of every sample; reads the heads of the shards."""
    store = FeatureStore.open(folder)
    found = []
    for number, entry in enumerate(store.entries):
        shard = store.shard(number)
        for index, (key, tokens) in enumerate(zip(shard.keys, shard.lengths, strict=True)):
            found.append({"key": key, "shard": entry.file, "tokens": tokens, "digest": shard.sample_digest(index)})
    return found


def repair(folder: Path, progress: Progress) -> dict[str, Any]:
    """Take damaged samples out of a store; each becomes a tombstone in the manifest, to be captured again.

    A shard that holds some is written anew beside the others, without them. Returns `damaged` (keys), `lost` (samples
    of shards that are unusable as a whole, whose keys nobody knows) and `kept`. Raises UserError where nothing is left.
    """
    manifest = manifests.read(folder)
    entries, lengths, damaged, lost = [], [], [], 0
    progress.total(sum(entry.bytes for entry in manifest.shards), "bytes")
    for number, entry in enumerate(manifest.shards):
        try:
            shard = Shard(folder / entry.file)
        except UserError:
            lost += entry.samples
            continue
        bad = set(shard.verify())
        progress.advance(entry.bytes)
        damaged += sorted(bad)
        file = entry.file
        if bad:
            file = f"shard-{number:05d}-{shard.digest[:8]}.safetensors"
            mended = without(shard, bad, folder / file)
            if mended is None:
                continue
            shard = mended
        entries.append(describe(shard, file))
        lengths += shard.lengths
    if not entries:
        raise UserError(f"{folder}: no sample is whole: capture again")
    quarantined = [*manifest.quarantined, *(Quarantined(key, "damaged: found by repair") for key in damaged)]
    manifests.write(folder, manifest.contract, entries, quarantined, lengths)
    return {"damaged": damaged, "lost": lost, "kept": len(lengths)}


def merge(out: Path, sources: Sequence[Path], progress: Progress) -> dict[str, int]:
    """Make `out` the store of all samples of `sources`, in order; a key that came before is left out.

    Shards enter by hard link, unless some of their samples came before. Returns `samples` and `duplicates`. Raises
    UserError: `out` is there already, contracts differ (the field is named), a damaged sample.
    """
    if out.exists():
        raise UserError(f"{out} is there already: choose another name or remove it")
    stores = [FeatureStore.open(source) for source in sources]
    first = stores[0].contract
    for store in stores[1:]:
        store.contract.require_equal(first, str(store.folder))
        if store.contract.dtype != first.dtype:
            raise UserError(f"{store.folder}: states in {store.contract.dtype}, those before in {first.dtype}")
    progress.total(sum(entry.bytes for store in stores for entry in store.entries), "bytes")
    aside = out.parent / f".{out.name}.merging"
    shutil.rmtree(aside, ignore_errors=True)
    pieces = aside / "pieces"
    pieces.mkdir(parents=True)
    seen: set[str] = set()
    paths: list[Path] = []
    quarantined: list[Quarantined] = []
    duplicates = 0
    for store in stores:
        for number, entry in enumerate(store.entries):
            shard = store.shard(number)
            if bad := shard.verify():
                raise UserError(f"{shard.path}: sample {bad[0]} is damaged: `eyas store repair {store.folder}`")
            progress.advance(entry.bytes)
            again = seen.intersection(shard.keys)
            seen |= set(shard.keys)
            duplicates += len(again)
            if again:
                part = without(shard, again, pieces / f"{len(paths):05d}.safetensors")
                paths += [] if part is None else [part.path]
            else:
                paths.append(shard.path)
        quarantined += store.quarantined
    create(aside, first, paths, [one for one in dict.fromkeys(quarantined) if one.key not in seen])
    shutil.rmtree(pieces)
    fsync_folder(aside)
    aside.rename(out)
    fsync_folder(out.parent)
    return {"samples": len(seen), "duplicates": duplicates}


def remove(folder: Path) -> int:
    """Delete a store, its manifest first; other files in the folder stay. Returns the bytes of its files."""
    if not (folder / manifests.NAME).is_file():
        raise UserError(f"{folder}: no feature store")
    files = [path for pattern in manifests.PARTS for path in folder.glob(pattern)]
    size = sum(path.stat().st_size for path in files)
    (folder / manifests.NAME).unlink()
    fsync_folder(folder)
    for path in files:
        path.unlink()
    if not any(folder.iterdir()):
        folder.rmdir()
    return size


def without(shard: Shard, keys: set[str], path: Path) -> Shard | None:
    """The shard less some samples, written as `path`; None, and no file, where none is left."""
    kept = [i for i, key in enumerate(shard.keys) if key not in keys]
    if not kept:
        return None
    layout = Layout([shard.place(i) for i in kept], shard.hidden_size, shard.dtype)
    return write_columns(path, layout, (shard.columns(i) for i in kept))


def _batches(lengths: Sequence[int], size: int) -> list[Sequence[int]]:
    return [lengths[i : i + size] for i in range(0, len(lengths), size)]
