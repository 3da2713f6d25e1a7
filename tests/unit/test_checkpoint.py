"""A draft on disk: exact names, exact values, and plain words for what is wrong with it."""

import dataclasses
import json

import pytest
import safetensors.torch
import torch

from eyas.draft import checkpoint
from eyas.draft.config import DraftConfig, rope_parameters
from eyas.draft.export import check_equal, layer_ids
from eyas.errors import UserError
from test_chain import make_draft
from test_inprocess import load

SGLANG = {
    "fc.weight",
    "norm.weight",
    "lm_head.weight",
    "d2t",
    "t2d",
    "midlayer.input_layernorm.weight",
    "midlayer.hidden_norm.weight",
    "midlayer.post_attention_layernorm.weight",
    "midlayer.mlp.gate_proj.weight",
    "midlayer.mlp.up_proj.weight",
    "midlayer.mlp.down_proj.weight",
    "midlayer.self_attn.q_proj.weight",
    "midlayer.self_attn.k_proj.weight",
    "midlayer.self_attn.v_proj.weight",
    "midlayer.self_attn.o_proj.weight",
}


@pytest.fixture(scope="module")
def target(tiny_llama):
    return load(tiny_llama)


@pytest.fixture
def saved(target, tmp_path):
    draft = make_draft(target, vocabulary=50)
    checkpoint.save(tmp_path, draft, torch.float32)
    return tmp_path, draft


def rewrite(folder, change):
    state = safetensors.torch.load_file(folder / "model.safetensors")
    change(state)
    safetensors.torch.save_file(state, folder / "model.safetensors")


def test_names_are_what_sglang_loads(saved):
    folder, _ = saved
    assert set(safetensors.torch.load_file(folder / "model.safetensors")) == SGLANG


def test_round_trip(saved, target):
    folder, draft = saved
    again = checkpoint.load(folder, target.embedding)
    assert checkpoint.digest(again) == checkpoint.digest(draft)
    check_equal(draft, again, torch.float32)
    halved = folder / "halved"
    halved.mkdir()
    checkpoint.save(halved, draft, torch.bfloat16)
    check_equal(draft, checkpoint.load(halved, target.embedding, torch.float32), torch.bfloat16)


def test_the_vocabulary_map_is_offsets(saved):
    folder, draft = saved
    state = safetensors.torch.load_file(folder / "model.safetensors")
    ids = torch.arange(50) + state["d2t"]
    assert state["d2t"].dtype == torch.int64
    assert torch.equal(state["t2d"].nonzero().flatten(), ids)
    assert torch.equal(ids, draft.target_ids)


def test_config_speaks_both_spellings(target):
    config = DraftConfig.from_target(target.info.config, 50).to_hf("float32")
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"]
    assert config["tie_word_embeddings"] is False
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert "eagle_aux_hidden_state_layer_ids" not in config["eagle_config"]
    again = DraftConfig.from_hf(config)
    assert again == DraftConfig.from_target(target.info.config, 50)
    assert layer_ids(config["eagle_config"], (2, 4, 5), "LlamaForCausalLM", 8) == {}
    for architecture, nested in (("LlamaForCausalLM", [2, 4, 5]), ("DeepseekV3ForCausalLM", [3, 5, 6])):
        said = layer_ids(config["eagle_config"], (3, 5, 6), architecture, 8)
        assert said["eagle_aux_hidden_state_layer_ids"] == [3, 5, 6]
        assert said["eagle_config"] == config["eagle_config"] | {"eagle_aux_hidden_state_layer_ids": nested}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"rope_theta": 5e5}, {"rope_type": "default", "rope_theta": 5e5}),
        (
            {"rope_theta": 1e4, "rope_scaling": {"type": "yarn", "factor": 4.0}},
            {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4},
        ),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}, {"rope_type": "default", "rope_theta": 7.0}),
    ],
)
def test_rope_in_old_and_new_spelling(old, new):
    assert rope_parameters(old) == new


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("lm_head.weight"), "lm_head.weight missing"),
        (lambda s: s.update({"layers.0.foo": torch.zeros(1)}), "unknown tensors midlayer.foo"),
        (lambda s: s.update({"fc.weight": torch.zeros(3, 3)}), r"fc.weight is \[3, 3\], expected"),
        (lambda s: s.update({"d2t": torch.zeros(50, dtype=torch.int64)}), "vocabulary map is damaged"),
    ],
)
def test_a_wrong_checkpoint_is_refused(saved, target, change, message):
    folder, _ = saved
    rewrite(folder, change)
    with pytest.raises(UserError, match=message):
        checkpoint.load(folder, target.embedding)


def test_a_cut_or_missing_file_is_refused(saved, target):
    folder, _ = saved
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(UserError, match="missing or damaged"):
        checkpoint.load(folder, target.embedding)
    path.unlink()
    with pytest.raises(UserError, match=r"model\.safetensors is missing"):
        checkpoint.load(folder, target.embedding)
    (folder / "config.json").unlink()
    with pytest.raises(UserError, match=r"no config\.json"):
        checkpoint.load(folder, target.embedding)


def test_another_target_or_architecture_is_refused(saved, target):
    folder, _ = saved
    with pytest.raises(UserError, match="made for a target"):
        checkpoint.load(folder, torch.nn.Embedding(259, 16))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaForCausalLM"]}))
    with pytest.raises(UserError, match="no EAGLE-3 draft"):
        checkpoint.load(folder, target.embedding)


def test_numbers_that_are_none_are_refused(saved, target):
    folder, _ = saved
    rewrite(folder, lambda s: s["fc.weight"].fill_(float("nan")))
    with pytest.raises(UserError, match=r"fc\.weight holds numbers that are not finite"):
        checkpoint.load(folder, target.embedding)


def test_a_draft_without_t2d_is_read(saved, target):
    folder, draft = saved
    rewrite(folder, lambda s: s.pop("t2d"))
    assert torch.equal(checkpoint.load(folder, target.embedding).t2d, draft.t2d)


def test_the_residual_of_speculators_is_the_normed_state(target):
    draft = make_draft(target, vocabulary=50)
    with torch.no_grad():
        draft.midlayer.hidden_norm.weight.uniform_(0.5, 1.5)
    state, attended = torch.randn(4, 32), torch.randn(4, 4, 8)
    normed = draft.midlayer.hidden_norm(state)
    plain = draft.finish(attended, normed)
    assert not torch.allclose(draft.finish(attended, state), plain)
    draft.config = dataclasses.replace(draft.config, norm_before_residual=True)
    torch.testing.assert_close(draft.finish(attended, state), plain)
    assert DraftConfig.from_hf(draft.config.to_hf("float32")) == draft.config
