"""Single tensors out of model folders of every layout."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from eyas.engines import weights
from eyas.errors import UserError

FILE = "model.safetensors"


@pytest.fixture
def folder(make_tiny: Callable[..., Path], tmp_path: Path) -> Path:
    """A copy of an untied tiny model that may be changed."""
    return Path(shutil.copytree(make_tiny(tied=False), tmp_path / "model"))


def test_untied(folder: Path) -> None:
    tensors = load_file(folder / FILE)
    assert torch.equal(weights.embedding(folder), tensors["model.embed_tokens.weight"])
    assert torch.equal(weights.head(folder), tensors["lm_head.weight"])
    assert torch.equal(weights.final_norm(folder), tensors["model.norm.weight"])
    assert weights.head(folder).shape == (259, 32)


def test_tied(tiny_llama: Path) -> None:
    assert torch.equal(weights.head(tiny_llama), weights.embedding(tiny_llama))
    assert weights.final_norm(tiny_llama).shape == (32,)


def test_sharded(folder: Path) -> None:
    tensors = load_file(folder / FILE)
    (folder / FILE).unlink()
    places = {name: f"{'a' if 'embed' in name else 'b'}.safetensors" for name in tensors}
    for file in set(places.values()):
        save_file({name: tensors[name] for name, place in places.items() if place == file}, folder / file)
    (folder / weights.INDEX).write_text(json.dumps({"weight_map": places}))
    assert torch.equal(weights.embedding(folder), tensors["model.embed_tokens.weight"])
    assert torch.equal(weights.head(folder), tensors["lm_head.weight"])
    (folder / "a.safetensors").unlink()
    with pytest.raises(UserError, match=r"a\.safetensors: cannot read model\.embed_tokens\.weight"):
        weights.embedding(folder)


@pytest.mark.parametrize(
    ("body", "head"),
    [
        ("language_model.model.", "language_model.lm_head.weight"),
        ("model.language_model.", "lm_head.weight"),
        ("", "lm_head.weight"),
    ],
)
def test_prefixes_and_nested_config(folder: Path, body: str, head: str) -> None:
    tensors = load_file(folder / FILE)
    renamed = {name.replace("model.", body, 1): tensor for name, tensor in tensors.items() if name != "lm_head.weight"}
    save_file({**renamed, head: tensors["lm_head.weight"]}, folder / FILE)
    assert torch.equal(weights.embedding(folder), tensors["model.embed_tokens.weight"])
    assert torch.equal(weights.head(folder), tensors["lm_head.weight"])
    assert torch.equal(weights.final_norm(folder), tensors["model.norm.weight"])
    save_file(renamed, folder / FILE)
    with pytest.raises(UserError, match=r"model\.safetensors: holds no lm_head\.weight"):
        weights.head(folder)
    (folder / "config.json").write_text(json.dumps({"text_config": {"tie_word_embeddings": True}}))
    assert torch.equal(weights.head(folder), tensors["model.embed_tokens.weight"])


def test_missing_and_damaged(folder: Path) -> None:
    save_file({"other": torch.zeros(2)}, folder / FILE)
    with pytest.raises(UserError, match=r"holds no model\.embed_tokens\.weight"):
        weights.embedding(folder)
    (folder / FILE).write_bytes(b"junk")
    with pytest.raises(UserError, match=r"model\.safetensors: cannot be read"):
        weights.final_norm(folder)
    (folder / FILE).unlink()
    with pytest.raises(UserError, match=r"model\.safetensors: cannot be read"):
        weights.embedding(folder)
    (folder / "config.json").unlink()
    with pytest.raises(UserError, match=r"config\.json: cannot be read"):
        weights.head(folder)
