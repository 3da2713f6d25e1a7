"""A feature store: a folder of shards and a manifest, read as one list of samples."""

import os
import shutil
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

from eyas.capture.contract import Contract
from eyas.engines.target import TargetInfo
from eyas.errors import UserError
from eyas.files import fsync_folder
from eyas.store import manifest as manifests
from eyas.store.manifest import Manifest, Quarantined, ShardEntry
from eyas.store.shard import Sample, Shard


def create(folder: Path, contract: Contract, shards: Sequence[Path], quarantined: Sequence[Quarantined] = ()) -> None:
    """Make `folder` a store of these finished shards, in this order; an earlier store there is replaced.

    The shards, which lie elsewhere on purpose, enter by hard link, or by copy from another file system. The manifest
    comes last: killed before, there is no store [a file that exists and is cut short stays in the training set for
    good]. Raises UserError: a shard that is unusable or not of the contract's kind, a sample key that occurs twice.
    """
    assert all(path.parent.resolve() != folder.resolve() for path in shards), "shards inside the store's own folder"
    opened = [Shard(path) for path in shards]
    seen: dict[str, Path] = {}
    for shard in opened:
        _require_kind(shard, contract)
        for key in shard.keys:
            if key in seen:
                raise UserError(f"sample {key} is in {seen[key]} and again in {shard.path}: remove one of them")
            seen[key] = shard.path

    folder.mkdir(parents=True, exist_ok=True)
    (folder / manifests.NAME).unlink(missing_ok=True)
    for old in folder.glob("shard-*.safetensors"):
        old.unlink()
    entries = []
    for index, shard in enumerate(opened):
        name = f"shard-{index:05d}.safetensors"
        _put(shard.path, folder / name)
        entries.append(
            ShardEntry(
                file=name,
                bytes=shard.bytes,
                samples=len(shard),
                tokens=sum(shard.lengths),
                supervised=shard.supervised,
                digest=shard.digest,
                lengths=shard.lengths,
            )
        )
    fsync_folder(folder)
    manifests.write(folder, Manifest(contract, entries, list(quarantined)))


class FeatureStore:
    """A store opened for reading. Opening reads the manifest only; a shard is opened when a sample of it is wanted.

    `contract`, `quarantined`: of the manifest. `lengths`: tokens of each sample, in order. `tokens`, `supervised`:
    totals.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self.contract = manifest.contract
        self.quarantined = manifest.quarantined
        self.lengths = [length for entry in manifest.shards for length in entry.lengths]
        self.tokens = sum(entry.tokens for entry in manifest.shards)
        self.supervised = sum(entry.supervised for entry in manifest.shards)
        self._entries = manifest.shards
        self._starts = [0, *accumulate(entry.samples for entry in manifest.shards)]
        self._opened: dict[int, Shard] = {}
        self._compared: set[int] = set()

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

    @property
    def keys(self) -> list[str]:
        """Keys of all samples, in order; reads every shard's header."""
        return [key for index in range(len(self._entries)) for key in self._shard(index).keys]

    def sample(self, index: int) -> Sample:
        """Sample `index`, counted from 0; reads nothing else. Its states are views of the file: change copies.

        Its digest is compared when it is first read. Raises UserError that names the shard: missing, damaged, or
        another one than the manifest says.
        """
        if not 0 <= index < len(self):
            raise IndexError(index)
        number = bisect_right(self._starts, index) - 1
        shard, place = self._shard(number), index - self._starts[number]
        if index not in self._compared:
            if not shard.is_whole(place):
                raise UserError(f"{shard.path}: sample {shard.keys[place]} is damaged: restore it or capture again")
            self._compared.add(index)
        return shard.sample(place)

    def verify(self) -> list[str]:
        """Read everything; return a line for each damaged sample and each unusable shard."""
        problems = []
        for index, entry in enumerate(self._entries):
            try:
                damaged = self._shard(index).verify()
            except UserError as error:
                problems.append(str(error))
            else:
                problems += [f"{self.folder / entry.file}: sample {key} is damaged" for key in damaged]
        return problems

    def _shard(self, index: int) -> Shard:
        if index not in self._opened:
            entry = self._entries[index]
            shard = Shard(self.folder / entry.file)
            if (shard.digest, shard.bytes, shard.lengths) != (entry.digest, entry.bytes, entry.lengths):
                raise UserError(f"{shard.path}: not the shard that {manifests.NAME} names: restore it or capture again")
            _require_kind(shard, self.contract)
            self._opened[index] = shard
        return self._opened[index]


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
