"""Single tensors of a model folder, read without loading the model: what a draft needs of its target.

Shapes: V vocabulary, H hidden size. Tensors are on the CPU, in the dtype that the file holds.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from eyas.errors import UserError
from eyas.files import read_json

if TYPE_CHECKING:
    from torch import Tensor

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_BODIES = ("model.", "language_model.model.", "model.language_model.", "")
_HEADS = ("", "language_model.", "model.", "model.language_model.")


def embedding(folder: Path) -> "Tensor":
    """The input embedding, [V, H]. Raises UserError: no such tensor, a missing or damaged file."""
    return _read(folder, tuple(body + "embed_tokens.weight" for body in _BODIES))


def head(folder: Path) -> "Tensor":
    """The output projection, [V, H]: the embedding where the two are tied.

    A head that is in the files counts even in a model that calls itself tied, as in transformers 5. Raises UserError:
    neither a head nor tied, a missing or damaged file.
    """
    names = tuple(prefix + "lm_head.weight" for prefix in _HEADS)
    if _tied(folder) and not _find(folder, names):
        return embedding(folder)
    return _read(folder, names)


def final_norm(folder: Path) -> "Tensor":
    """The weight of the norm before the head, [H]. Raises UserError: no such tensor, a missing or damaged file."""
    return _read(folder, tuple(body + "norm.weight" for body in _BODIES))


def last_mlp(folder: Path, layers: int) -> "dict[str, Tensor] | None":
    """The last of `layers` layers' gate_proj, up_proj [I, H], down_proj [H, I] and norm [H] before them.

    None where that layer has no such dense MLP (mixture of experts, other names).
    """
    layer = f"layers.{layers - 1}."
    parts = {name: f"{layer}mlp.{name}.weight" for name in ("gate_proj", "up_proj", "down_proj")}
    parts["norm"] = f"{layer}post_attention_layernorm.weight"
    names = {name: tuple(body + part for body in _BODIES) for name, part in parts.items()}
    if not all(_find(folder, candidates) for candidates in names.values()):
        return None
    return {name: _read(folder, candidates) for name, candidates in names.items()}


def _tied(folder: Path) -> bool:
    config = _json(folder / "config.json")
    text = config.get("text_config") or {}
    return bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings", False)))


def _find(folder: Path, names: tuple[str, ...]) -> tuple[Path, str] | None:
    """The file that holds the first of `names`, and that name."""
    from safetensors import SafetensorError, safe_open

    index = folder / INDEX
    if index.exists():
        places = _json(index).get("weight_map", {})
    else:
        path = folder / SINGLE
        try:
            with safe_open(path, "pt") as file:
                places = dict.fromkeys(file.keys(), SINGLE)
        except (OSError, SafetensorError) as error:
            raise UserError(f"{path}: cannot be read ({error}); download the model again") from error
    return next(((folder / places[name], name) for name in names if name in places), None)


def _read(folder: Path, names: tuple[str, ...]) -> "Tensor":
    from safetensors import SafetensorError, safe_open

    found = _find(folder, names)
    if found is None:
        where = folder / (INDEX if (folder / INDEX).exists() else SINGLE)
        raise UserError(f"{where}: holds no {names[0]}, under no prefix known here; is the model complete?")
    path, name = found
    try:
        with safe_open(path, "pt") as file:
            tensor: Tensor = file.get_tensor(name)
            return tensor
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: cannot read {name} ({error}); download the model again") from error


def _json(path: Path) -> dict[str, Any]:
    try:
        content = read_json(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error
    if not isinstance(content, dict):
        raise UserError(f"{path}: not a JSON object; download the model again")
    return content
