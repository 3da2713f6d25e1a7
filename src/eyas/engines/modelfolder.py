"""The files of a model folder, checked without reading weights: is everything there that a target needs?

Each question raises one UserError, of one line, that names the file and the remedy.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from eyas.digests import digest_bytes, digest_file, digest_json, digest_sampled
from eyas.engines.weights import INDEX, SINGLE
from eyas.errors import UserError
from eyas.files import read_json

LEFTOVERS = ("*.incomplete", "*.part", "*.partial", "*.aria2", ".cache/huggingface/download/**/*.incomplete")
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json", "tiktoken.model")
TOKENIZER_FILES = (*TOKENIZERS, "merges.txt", "special_tokens_map.json", "added_tokens.json")
HEADER_LIMIT = 100 << 20


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object; {} if the file does not exist."""
    try:
        content = read_json(path)
    except FileNotFoundError:
        return {}
    if not isinstance(content, dict):
        raise UserError(f"{path}: not a JSON object; download it again")
    return content


def refuse_half_downloaded(folder: Path) -> None:
    """Refuse a folder in which a download was broken off."""
    left = [path for pattern in LEFTOVERS for path in folder.glob(pattern)]
    if left:
        raise UserError(f"{left[0]}: a download was broken off; finish it, or delete this file if the model is whole")


def weight_files(folder: Path) -> dict[str, tuple[int, str]]:
    """Size and header digest of every safetensors file of the model, by name.

    Raises UserError: files missing, not as long as their header says, or without a tensor that the index puts there.
    """
    index = folder / INDEX
    if index.exists():
        places = read_object(index).get("weight_map")
        if not isinstance(places, dict) or not places or not all(isinstance(name, str) for name in places.values()):
            raise UserError(f"{index}: has no weight_map; download it again")
        wanted: dict[str, set[str]] = {}
        for tensor, name in places.items():
            wanted.setdefault(name, set()).add(tensor)
        absent = sorted(name for name in wanted if not (folder / name).exists())
        if absent:
            raise UserError(
                f"{folder / absent[0]}: missing; {len(absent)} of the {len(wanted)} weight files that {INDEX} names "
                "are; finish the download"
            )
    elif (folder / SINGLE).exists():
        wanted = {SINGLE: set()}
    else:
        raise UserError(_no_safetensors(folder))
    return {name: _checked(folder / name, tensors) for name, tensors in sorted(wanted.items())}


def model_digest(folder: Path, files: dict[str, tuple[int, str]]) -> str:
    """Digest of config, index, and each weight file: size, header and samples, which tell fine-tunes apart."""
    index = folder / INDEX
    return digest_json(
        {
            "config": digest_file(folder / "config.json"),
            "index": digest_file(index) if index.exists() else None,
            "files": files,
            "samples": {name: digest_sampled(folder / name) for name in files},
        }
    )


def tokenizer_digest(folder: Path) -> str:
    """Digest of everything that decides how text becomes ids; the chat template is apart."""
    names = [name for name in TOKENIZER_FILES if (folder / name).exists()]
    if not any(name in TOKENIZERS for name in names):
        raise UserError(f"{folder}: has no tokenizer ({', '.join(TOKENIZERS[:3])}); download the whole model")
    settings = read_object(folder / "tokenizer_config.json")
    settings.pop("chat_template", None)
    return digest_json({"settings": settings, "files": {name: digest_file(folder / name) for name in names}})


def template_digest(folder: Path) -> str:
    """Digest of the chat template. Raises UserError: there is none."""
    jinja = folder / "chat_template.jinja"
    try:
        template: Any = jinja.read_text(encoding="utf-8")
    except FileNotFoundError:
        template = read_object(folder / "tokenizer_config.json").get("chat_template")
    except UnicodeDecodeError as error:
        raise UserError(f"{jinja}: not UTF-8 text; download it again") from error
    if not template:
        raise UserError(
            f"{folder}: the tokenizer has no chat template; take a model made for chat (-Instruct, -it), "
            "or put chat_template.jinja into the folder"
        )
    return digest_json(template)


def eos_token_ids(folder: Path, config: dict[str, Any], vocab_size: int) -> tuple[int, ...]:
    """The ids that end an answer, sorted: those of generation_config.json, config.json and the tokenizer together."""
    text = config.get("text_config") or config
    sources = (read_object(folder / "generation_config.json"), config, text)
    ids = {token for source in sources for token in _listed(source.get("eos_token_id"), folder)}
    ids.update(_tokenizer_eos(folder))
    if not ids:
        raise UserError(f"{folder}: no token that ends an answer; set eos_token_id in generation_config.json")
    outside = sorted(token for token in ids if not 0 <= token < vocab_size)
    if outside:
        raise UserError(f"{folder}: eos_token_id {outside[0]} is outside the vocabulary of {vocab_size}; correct it")
    return tuple(sorted(ids))


def _listed(value: Any, folder: Path) -> list[int]:
    values = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in values):
        raise UserError(f"{folder}: eos_token_id is {value!r}, not an id or a list of ids; correct it")
    return values


def _tokenizer_eos(folder: Path) -> Iterator[int]:
    """The id of the tokenizer's end token; none where its files do not say."""
    settings = read_object(folder / "tokenizer_config.json")
    token = settings.get("eos_token") or read_object(folder / "special_tokens_map.json").get("eos_token")
    content = token.get("content") if isinstance(token, dict) else token
    if content is None:
        return
    tokenizer = read_object(folder / "tokenizer.json")
    vocabulary = (tokenizer.get("model") or {}).get("vocab") or read_object(folder / "vocab.json")
    added = {entry["content"]: entry["id"] for entry in tokenizer.get("added_tokens", [])}
    added |= {entry["content"]: int(index) for index, entry in settings.get("added_tokens_decoder", {}).items()}
    if content in added:
        yield added[content]
    elif isinstance(vocabulary, dict) and content in vocabulary:
        yield vocabulary[content]


def _checked(path: Path, tensors: set[str]) -> tuple[int, str]:
    """Size and header digest of a safetensors file. Raises UserError: cut short, too long, not safetensors."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = int.from_bytes(start, "little")
        raw = file.read(length) if length <= HEADER_LIMIT else b""
    if start == b"version ":
        raise UserError(f"{path}: a git-lfs pointer, not the weights; run git lfs pull in its folder")
    if size < 8 or 8 < size < 8 + length <= 8 + HEADER_LIMIT:
        raise UserError(f"{path}: cut short within its header ({size:,} bytes); download it again")
    try:
        header = json.loads(raw)
        header.pop("__metadata__", None)
        end = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
        raise UserError(f"{path}: not a safetensors file; download it again") from error
    if size != end:
        what = "cut short" if size < end else "longer than its header says"
        raise UserError(f"{path}: {what}, {size:,} bytes instead of {end:,}; download it again")
    absent = sorted(tensors - header.keys())
    if absent:
        raise UserError(f"{path}: lacks {absent[0]}, which {INDEX} puts there; download the model again")
    return size, digest_bytes(raw)


def _no_safetensors(folder: Path) -> str:
    """Why there is nothing to read, in one line."""
    names = sorted(path.name for path in folder.iterdir())
    other = [name for name in names if name.endswith(".safetensors")]
    if any(name.startswith("adapter_model") for name in names):
        return f"{folder}: an adapter (LoRA), not a model; merge it into its base model and save that"
    if other:
        return f"{folder}: neither {SINGLE} nor {INDEX}, only {other[0]}; take the model in the Hugging Face layout"
    if any(name.endswith(".gguf") for name in names):
        return f"{folder}: only GGUF weights; eyas reads safetensors, take the original model"
    if any(name.endswith((".bin", ".pt", ".pth")) for name in names):
        return f"{folder}: only PyTorch (.bin) weights; save the model again with save_pretrained, as safetensors"
    return f"{folder}: no {SINGLE}; download the model's weights too"
