"""A feature store: a folder of shards and a manifest, read as one list of samples."""

import os
import shutil
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from pathlib import Path

import torch

from eyas.capture.contract import Contract
from eyas.digests import digest_file
from eyas.engines.target import TargetInfo
from eyas.errors import UserError
from eyas.files import fsync_folder
from eyas.progress import Progress, Silent
from eyas.store import manifest as manifests
from eyas.store.manifest import Manifest, Quarantined, ShardEntry
from eyas.store.sample import Columns, Sample
from eyas.store.shard import Shard

OPENED = 16
"""Shards mapped at once."""


def create(folder: Path, contract: Contract, shards: Sequence[Path], quarantined: Sequence[Quarantined] = ()) -> None:
    """Make `folder` a store of these finished shards, in this order; an earlier store there is replaced.

    The shards, which lie elsewhere on purpose, enter by hard link, or by copy from another file system. The manifest
    comes last: killed before, there is no store [a file that exists and is cut short stays in the training set for
    good]. Raises UserError: a shard that is unusable or not of the contract's kind, a sample key that occurs twice.
    """
    assert all(path.parent.resolve() != folder.resolve() for path in shards), "shards inside the store's own folder"
    seen: dict[str, Path] = {}
    entries: list[ShardEntry] = []
    lengths: list[int] = []
    for index, path in enumerate(shards):
        shard = Shard(path)
        _require_kind(shard, contract)
        for key in shard.keys:
            if key in seen:
                raise UserError(f"sample {key} is in {seen[key]} and again in {path}: remove one of them")
            seen[key] = path
        lengths += shard.lengths
        entries.append(describe(shard, f"shard-{index:05d}.safetensors"))

    folder.mkdir(parents=True, exist_ok=True)
    (folder / manifests.NAME).unlink(missing_ok=True)
    for path, entry in zip(shards, entries, strict=True):
        (folder / entry.file).unlink(missing_ok=True)
        _put(path, folder / entry.file)
    fsync_folder(folder)
    manifests.write(folder, contract, entries, list(quarantined), lengths)


def describe(shard: Shard, file: str) -> ShardEntry:
    """What a manifest says of a shard that is called `file` there."""
    return ShardEntry(file, shard.bytes, len(shard), sum(shard.lengths), shard.supervised, shard.digest)


class FeatureStore:
    """A store opened for reading. Opening reads the manifest only; a shard is opened when a sample of it is wanted, and
    at most OPENED stay open, so that memory does not grow with the store.

    `contract`, `quarantined`, `entries`: of the manifest. `tokens`, `supervised`: totals. One thread uses it at a time.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self.contract = manifest.contract
        self.quarantined = manifest.quarantined
        self.entries = manifest.shards
        self.tokens = sum(entry.tokens for entry in manifest.shards)
        self.supervised = sum(entry.supervised for entry in manifest.shards)
        self._index_file, self._index_digest = folder / manifest.index_file, manifest.index
        self._starts = [0, *accumulate(entry.samples for entry in manifest.shards)]
        self._index = manifests.read_index(self._index_file, self._starts[-1])
        self._opened: OrderedDict[int, Shard] = OrderedDict()
        self._compared = bytearray(self._starts[-1])

    @classmethod
    def open(cls, folder: Path, contract: Contract | None = None, target: TargetInfo | None = None) -> "FeatureStore":
        """Open the store in `folder`: with `contract` only if its states are what that asks for, with `target` only if
        they are that target's.

        Raises UserError: no store, a damaged manifest, a contract that differs (field and both values named).
        """
        manifest = manifests.read(folder)
        if contract is not None:
            manifest.contract.require_equal(contract, str(folder))
        if target is not None:
            manifest.contract.require_target(target, str(folder))
        return cls(folder, manifest)

    def __len__(self) -> int:
        return self._starts[-1]

    @cached_property
    def lengths(self) -> list[int]:
        """Tokens of each sample, in order; touches no shard."""
        lengths: list[int] = self._index.tolist()
        return lengths

    @property
    def keys(self) -> list[str]:
        """Keys of all samples, in order; reads every shard's head."""
        return [key for index in range(len(self.entries)) for key in self.shard(index).keys]

    def sample(self, index: int) -> Sample:
        """Sample `index`, counted from 0; reads nothing else. Its states may be views of the file: change copies.

        Its digest is compared when it is first read. Raises UserError that names the shard: missing, damaged, or
        another one than the manifest says.
        """
        shard, place = self.where(index)
        if not self._compared[index] and not shard.is_whole(place):
            raise _damaged(shard, place)
        self._compared[index] = 1
        return shard.sample(place)

    def ids(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids int64 [t] and answers bool [t] of sample `index`. Reads no states, so its digest is not compared."""
        shard, place = self.where(index)
        return shard.ids(place)

    def read(self, index: int, into: Columns) -> None:
        """Copy sample `index`, undecoded, into tensors of its shapes (`where(index)` tells them). Otherwise as
        `sample`."""
        shard, place = self.where(index)
        if not shard.read(place, into, compare=not self._compared[index]):
            raise _damaged(shard, place)
        self._compared[index] = 1

    def where(self, index: int) -> tuple[Shard, int]:
        """The shard of sample `index`, and its number there. Raises UserError: no such shard."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        number = bisect_right(self._starts, index) - 1
        return self.shard(number), index - self._starts[number]

    def verify(self, progress: Progress | None = None) -> list[str]:
        """Read everything; return a line for each damaged sample and each unusable file."""
        progress = progress or Silent()
        progress.total(sum(entry.bytes for entry in self.entries), "bytes")
        problems = []
        if digest_file(self._index_file) != self._index_digest:
            problems.append(f"{self._index_file}: damaged")
        for index, entry in enumerate(self.entries):
            try:
                damaged = self.shard(index).verify()
            except UserError as error:
                problems.append(str(error))
            else:
                problems += [f"{self.folder / entry.file}: sample {key} is damaged" for key in damaged]
            progress.advance(entry.bytes)
        return problems

    def shard(self, index: int) -> Shard:
        """Shard `index`, if it is the one that the manifest names. Raises UserError."""
        if index in self._opened:
            self._opened.move_to_end(index)
            return self._opened[index]
        entry, place = self.entries[index], slice(self._starts[index], self._starts[index + 1])
        shard = Shard(self.folder / entry.file)
        if (shard.digest, shard.bytes, len(shard)) != (entry.digest, entry.bytes, entry.samples):
            raise UserError(f"{shard.path}: not the shard that {manifests.NAME} names: restore it or capture again")
        if not torch.equal(self._index[place], torch.tensor(shard.lengths, dtype=torch.int32)):
            raise UserError(f"{self._index_file}: damaged, it contradicts {entry.file}: restore it")
        _require_kind(shard, self.contract)
        self._opened[index] = shard
        if len(self._opened) > OPENED:
            self._opened.popitem(last=False)
        return shard


def _damaged(shard: Shard, place: int) -> UserError:
    return UserError(f"{shard.path}: sample {shard.keys[place]} is damaged: restore it or capture again")


def _require_kind(shard: Shard, contract: Contract) -> None:
    here = (shard.hidden_size, str(shard.dtype).removeprefix("torch."))
    if here != (contract.hidden_size, contract.dtype):
        raise UserError(
            f"{shard.path}: states of width {here[0]} in {here[1]}, its contract says {contract.hidden_size} in "
            f"{contract.dtype}: capture again"
        )


def _put(source: Path, target: Path) -> None:
    """Give `source` the second name `target`; a durable copy where hard links are not possible."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
        with target.open("rb") as file:
            os.fsync(file.fileno())
