"""The capture contract: what has to be known about captured states before they may be used.

It is written once, when states are captured, travels in the store's manifest and with the draft, and is compared at
every door. Most ways to mix up states are silent: training looks healthy and the served draft is rejected.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

from eyas.engines.target import TargetInfo
from eyas.errors import UserError

FORMAT = 1

REMEDIES = {
    "format": "capture again with this version of eyas",
    "model_digest": "use the target that the states were captured from, or capture again",
    "tokenizer_digest": "use the tokenizer that the samples were rendered with, or capture again",
    "template_digest": "use the chat template that the samples were rendered with, or capture again",
    "layers": "set capture.layers to the same layers (as hidden_states indices), or capture again",
    "last_is_normed": "capture again: the last state before the final norm is another tensor than the one after it",
    "hidden_size": "use the target that the states were captured from, or capture again",
    "vocab_size": "use the target that the states were captured from, or capture again",
}
"""The fields that must be equal, in the order in which they are compared, and what to do where one is not."""

TYPES = {
    "format": int,
    "model_digest": str,
    "tokenizer_digest": str,
    "template_digest": str,
    "layers": list,
    "last_is_normed": bool,
    "dtype": str,
    "hidden_size": int,
    "vocab_size": int,
    "engine": str,
    "engine_version": str,
    "flags": dict,
}
"""Each field's type as JSON."""


@dataclass(frozen=True)
class Contract:
    """Where captured states come from and what they mean.

    `dtype`, `engine`, `engine_version` and `flags` are recorded and not compared: they change states by rounding only,
    and legitimately differ (held-out features keep the target's dtype while training ones are halved; a server captures
    what the in-process engine replays). How much such states differ is measured by the proofs (`capture/proofs.py`), a
    thing that no name of a dtype or version can tell. A difference in any other field means other tensors.
    """

    format: int
    model_digest: str
    tokenizer_digest: str
    template_digest: str
    layers: tuple[int, int, int]
    """hidden_states indices, ascending (`engines/layers.py`)."""
    last_is_normed: bool
    """`last` is the state after the target's final norm."""
    dtype: str
    """Of the stored states: float32, bfloat16 or float8_e4m3fn."""
    hidden_size: int
    vocab_size: int
    engine: str
    engine_version: str
    flags: dict[str, str]
    """Engine settings that can change rounding: attention kernel, parallelism, device."""

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {**dataclasses.asdict(self), "layers": list(self.layers)}

    @classmethod
    def from_dict(cls, data: Any, where: str) -> "Contract":
        """The contract that `to_dict` gave; `where` names its place in errors.

        Raises UserError: no mapping, a field missing, unknown or of a wrong type.
        """
        if not isinstance(data, dict):
            raise UserError(f"{where}: the capture contract is not a mapping: capture again")
        for name in sorted(TYPES.keys() ^ data.keys()):
            what = "lacks" if name in TYPES else "has an unknown field"
            raise UserError(f"{where}: the capture contract {what} {name}: use the eyas that wrote it or capture again")
        for name, kind in TYPES.items():
            if type(data[name]) is not kind:
                raise UserError(f"{where}: {name} of the capture contract is {data[name]!r}: restore or capture again")
        if [type(layer) for layer in data["layers"]] != [int, int, int]:
            raise UserError(f"{where}: layers of the capture contract are {data['layers']}: restore or capture again")
        return cls(**{**data, "layers": tuple(data["layers"])})

    def require_target(self, info: TargetInfo, where: str) -> None:
        """Refuse states of another target, tokenizer or chat template than `info`'s. Raises UserError, as below."""
        fields = ("model_digest", "tokenizer_digest", "template_digest", "hidden_size", "vocab_size")
        self.require_equal(dataclasses.replace(self, **{name: getattr(info, name) for name in fields}), where)

    def require_equal(self, other: "Contract", where: str) -> None:
        """Refuse states that are other than wanted: `self` is what is there, `other` what is needed.

        Raises UserError that names the first differing field, both values and the remedy; `where` names what carries
        this contract (a store's folder, a draft's).
        """
        for name, remedy in REMEDIES.items():
            here, needed = getattr(self, name), getattr(other, name)
            if here != needed:
                raise UserError(f"{where}: captured with {name} {here!r}, needed is {needed!r}: {remedy}")
