"""A model made dear computes what the cheap one computes."""

from pathlib import Path

import pytest
import torch
import transformers

from eyas.engines import dear
from eyas.errors import UserError
from eyas.files import read_json, write_json


@pytest.fixture
def cheap(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64, max_position_embeddings=64, tie_word_embeddings=True,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "cheap")
    return tmp_path / "cheap"


def outputs(folder: Path) -> transformers.utils.ModelOutput:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(input_ids=torch.arange(20)[None] * 3 % 64, output_hidden_states=True)


def test_logits_and_states_are_the_same(cheap: Path, tmp_path: Path) -> None:
    made = dear.make(cheap, tmp_path / "dear", 3)
    assert read_json(made / "config.json")["num_hidden_layers"] == 12
    one, other = outputs(cheap), outputs(made)
    assert torch.equal(one.logits, other.logits)
    assert len(other.hidden_states) == 13
    for index in range(4):
        assert torch.equal(one.hidden_states[index], other.hidden_states[index])


def test_once_is_the_model_itself(cheap: Path, tmp_path: Path) -> None:
    made = dear.make(cheap, tmp_path / "same", 1)
    assert torch.equal(outputs(cheap).logits, outputs(made).logits)


def test_another_class_is_refused(cheap: Path, tmp_path: Path) -> None:
    write_json(cheap / "config.json", {**read_json(cheap / "config.json"), "model_type": "qwen2"})
    with pytest.raises(UserError, match="only a Llama-type model"):
        dear.make(cheap, tmp_path / "dear", 2)
