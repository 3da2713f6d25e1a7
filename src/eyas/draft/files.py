"""The files of a draft folder, ours or another tool's, under one spelling of the tensor names.

SGLang and eyas say `midlayer.`, vLLM and speculators `layers.0.`; some tools put `model.` before every name. What the
tensors have to be is another matter: `draft/checkpoint.py` and `draft/verify.py`.
"""

from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch

from eyas.errors import UserError
from eyas.files import read_json

LEGACY = {"aux_norm_low": "fc_norm.0", "aux_norm_mid": "fc_norm.1", "aux_norm_high": "fc_norm.2"}


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a draft folder. Raises UserError where there is none."""
    path = folder / "config.json"
    if not path.is_file():
        raise UserError(f"{folder}: no config.json; give the folder of an exported EAGLE-3 draft")
    config = read_json(path)
    if not isinstance(config, dict):
        raise UserError(f"{path}: not a JSON object")
    names = config.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UserError(f'{path}: architectures is {names!r}; write a list, as ["LlamaForCausalLMEagle3"]')
    return config


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the folder's safetensors files, by its name in our spelling.

    Raises UserError: no such file, a damaged one, two names that mean the same tensor.
    """
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        others = sorted(path.name for path in folder.glob("*") if path.suffix in (".bin", ".pt", ".pth"))
        instead = f"only {others[0]}: save it as safetensors" if others else "export or download the draft again"
        raise UserError(f"{folder}: model.safetensors is missing; {instead}")
    found: dict[str, torch.Tensor] = {}
    for path in paths:
        try:
            state = safetensors.torch.load_file(path)
        except (OSError, safetensors.SafetensorError) as error:
            raise UserError(f"{path}: missing or damaged ({error}); export or download the draft again") from error
        for name, tensor in state.items():
            if spell(name) in found:
                raise UserError(f"{path}: {name} is there twice, as {spell(name)} too; export the draft again")
            found[spell(name)] = tensor
    return found


def spell(name: str) -> str:
    """A tensor's name in our spelling."""
    name = name.removeprefix("model.")
    if name.startswith("layers.0."):
        name = "midlayer." + name.removeprefix("layers.0.")
    first, dot, rest = name.partition(".")
    return LEGACY.get(first, first) + dot + rest
