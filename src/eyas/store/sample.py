"""A sample, and what of it stands in a shard."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
import xxhash

from eyas.store import codec
from eyas.store.codec import FP8
from eyas.store.layout import NAMES, Place, supervised

Columns = dict[str, torch.Tensor]
"""A sample's part of each tensor of a shard, in file order."""


@dataclass(frozen=True, eq=False)
class Sample:
    """One conversation with the target's states at its t tokens."""

    key: str
    ids: torch.Tensor
    """int64 [t]."""
    answer: torch.Tensor
    """bool [t]: x[i] belongs to an answer."""
    aux: torch.Tensor
    """[t, 3H]: the three captured layers side by side, low to high, float32 or bfloat16."""
    last: torch.Tensor
    """[t, H]: the last hidden state, in the dtype of `aux`; rows that were not kept are NaN."""
    argmax: torch.Tensor
    """int64 [t]: the target's full-vocabulary greedy choice after each position; -1 where not known."""


def place(sample: Sample, complete: bool = True) -> Place:
    """The sample's place; `complete`: `last` is kept at every token, else where the next one belongs to an answer."""
    tokens = len(sample.ids)
    return Place(sample.key, tokens, tokens if complete else int(supervised(sample.answer).sum()))


def to_columns(sample: Sample, where: Place, dtype: torch.dtype) -> Columns:
    """The sample as it stands in a shard whose states have `dtype`. What does not agree is an AssertionError."""
    _check(sample, where)
    last = sample.last if where.kept == where.tokens else sample.last[supervised(sample.answer)]
    assert len(last) == where.kept, sample.key
    columns = {"input_ids": sample.ids.int(), "argmax": sample.argmax.int()}
    if dtype == FP8:
        aux, columns["aux_scale"] = codec.encode(sample.aux, 3)
        last, columns["last_scale"] = codec.encode(last, 1)
    else:
        aux = sample.aux
    return {
        **columns,
        "aux": aux.to(dtype),
        "last": last.to(dtype),
        "loss_mask": sample.answer.to(torch.uint8),
    }


def from_columns(key: str, columns: Mapping[str, torch.Tensor]) -> Sample:
    """The sample that stands in a shard; fp8 states are decoded to bfloat16, others are views."""
    answer, aux, last = columns["loss_mask"].bool(), columns["aux"], columns["last"]
    if aux.dtype == FP8:
        aux = codec.decode(aux, columns["aux_scale"], torch.bfloat16)
        last = codec.decode(last, columns["last_scale"], torch.bfloat16)
    if len(last) != len(answer):
        kept, last = last, last.new_full((len(answer), last.shape[1]), torch.nan)
        last[supervised(answer)] = kept
    return Sample(key, columns["input_ids"].long(), answer, aux, last, columns["argmax"].long())


def completed(sample: Sample, other: Sample) -> Sample:
    """The sample, with rows of `last` that were not kept taken from another capture of the same ids."""
    if sample.last.shape != other.last.shape or not bool(sample.last.isnan().any()):
        return sample
    kept = supervised(sample.answer)[:, None]
    return replace(sample, last=torch.where(kept, sample.last, other.last.to(sample.last.dtype)))


def begin_digest(key: str, aux: torch.Tensor) -> xxhash.xxh3_128:
    """What the digest of a sample begins with: its key, its length, dtype and width."""
    return xxhash.xxh3_128(f"{key} {tuple(aux.shape)} {NAMES[aux.dtype]} ".encode())


def digest(key: str, columns: Mapping[str, torch.Tensor]) -> bytes:
    """Digest of a sample: `begin_digest`, then the bytes of all its tensors in file order."""
    state = begin_digest(key, columns["aux"])
    for tensor in columns.values():
        state.update(raw(tensor))
    return state.digest()


def raw(tensor: torch.Tensor) -> memoryview:
    """A tensor's bytes, without a copy where it is contiguous and on the CPU."""
    if not tensor.numel():
        return memoryview(b"")
    return tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data.cast("B")


def _check(sample: Sample, where: Place) -> None:
    """Assert that a sample is whole."""
    rows, limit = len(sample.ids), torch.iinfo(torch.int32).max
    hidden = sample.last.shape[1]
    assert (sample.key, rows) == (where.key, where.tokens), sample.key
    assert sample.aux.dtype == sample.last.dtype, sample.key
    assert sample.aux.dtype in (torch.float32, torch.bfloat16), sample.key
    assert sample.ids.dtype == sample.argmax.dtype == torch.int64, sample.key
    assert sample.answer.dtype == torch.bool, sample.key
    assert sample.aux.shape == (rows, 3 * hidden), sample.key
    assert sample.last.shape == (rows, hidden), sample.key
    assert sample.ids.shape == sample.answer.shape == sample.argmax.shape == (rows,), sample.key
    assert 0 <= int(sample.ids.min()) <= int(sample.ids.max()) <= limit, sample.key
    assert -1 <= int(sample.argmax.min()) <= int(sample.argmax.max()) <= limit, sample.key
