"""Reading what the plugin wrote: one request's states, whole or refused."""

import json
from dataclasses import dataclass
from pathlib import Path

import safetensors
import torch

from eyas.engines.sglang.plugin.protocol import FORMAT, Wanted
from eyas.errors import UserError

NAMES = {"ids", "aux", "last"}


@dataclass(frozen=True, eq=False)
class Captured:
    """The states of one request of T tokens; views of the file, which may be deleted meanwhile."""

    wanted: Wanted
    ids: torch.Tensor
    """int64 [T], as the forward pass saw them."""
    aux: torch.Tensor
    """[T, 3H], low to high."""
    last: torch.Tensor
    """[T, H], after the final norm."""
    layers: tuple[int, ...]
    """hidden_states indices."""


def read(path: Path, root: Path) -> Captured:
    """Read a capture file that lies under `root`.

    Raises UserError that names the file: outside of `root` (a path that a server names is not to be trusted
    [Model-Optimizer 1509]), missing, cut short, not the plugin's, shapes that contradict its request.
    """
    if not path.resolve().is_relative_to(root.resolve()):
        raise UserError(f"{path}: lies outside of the capture root {root}; it is neither read nor deleted")
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT or set(file.keys()) != NAMES:
                raise UserError(f"{path}: not a capture file of this version's plugin; capture again")
            tensors = {name: file.get_tensor(name) for name in NAMES}
    except OSError as error:
        raise UserError(f"{path}: cannot read the capture ({error.strerror or error}); capture again") from error
    except safetensors.SafetensorError as error:
        raise UserError(f"{path}: cut short or damaged ({error}); capture again") from error
    wanted = Wanted.of(metadata.get("rid", ""))
    if wanted is None:
        raise UserError(f"{path}: names no request; capture again")
    aux, last, ids = tensors["aux"], tensors["last"], tensors["ids"]
    hidden = last.shape[-1] if last.dim() == 2 else 0
    if (
        ids.shape != (wanted.tokens,)
        or last.shape != (wanted.tokens, hidden)
        or aux.shape != (wanted.tokens, 3 * hidden)
    ):
        raise UserError(
            f"{path}: {list(ids.shape)} ids, {list(aux.shape)} and {list(last.shape)} states for a request of "
            f"{wanted.tokens} tokens; capture again"
        )
    return Captured(wanted, ids.long(), aux, last, tuple(json.loads(metadata["layers"])))
