"""The tiny twin: of the target's class, in the target's naming, and what is proven on it."""

import copy
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import configs
from eyas.config import Capture, Server
from eyas.draft import checkpoint
from eyas.engines.sglang import twin, twinmodel, twinproofs
from eyas.engines.sglang.checks import Check
from eyas.engines.sglang.twinconfig import shrink
from eyas.engines.sglang.twinmodel import Twin
from eyas.engines.sglang.twinproofs import Proven
from eyas.errors import UserError
from eyas.progress import Silent
from eyas.store.shard import Sample


@pytest.fixture(scope="module", params=["LLAMA", "DEEPSEEK_V3", "KIMI_K25"])
def config(request: pytest.FixtureRequest) -> dict[str, Any]:
    found: dict[str, Any] = getattr(configs, request.param)
    return found


@pytest.fixture(scope="module")
def made(config: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Twin:
    return twinmodel.make(configs.info(config, Path("/nowhere")), tmp_path_factory.mktemp("twin") / "model", 1)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Twin:
    folder = tmp_path_factory.mktemp("twin") / "model"
    return twinmodel.make(configs.info(configs.LLAMA, Path("/nowhere")), folder, 1)


def test_small_and_of_the_same_kind(config: dict[str, Any]) -> None:
    before = copy.deepcopy(config)
    small = shrink(config, 1)
    assert config == before
    text, old = small.get("text_config", small), config.get("text_config", config)
    assert small["architectures"] == config["architectures"]
    assert text["num_hidden_layers"] == 8
    assert text["hidden_size"] <= 1024
    assert text["vocab_size"] == 1024
    for same in ("rope_scaling", "rope_theta", "topk_group", "n_group", "scoring_func", "kv_lora_rank", "v_head_dim",
                 "qk_nope_head_dim", "qk_rope_head_dim", "rms_norm_eps", "tie_word_embeddings"):  # fmt: skip
        assert text.get(same) == old.get(same)
    assert "quantization_config" not in text
    assert "quantization_config" not in small
    for part in (small, text):
        for key, value in part.items():
            if key.endswith("token_id"):
                assert max(value) < 1024 if isinstance(value, list) else value < 1024


def test_grouped_heads_keep_their_size_and_share() -> None:
    for tp in (1, 2, 8):
        small = shrink(configs.LLAMA, tp)
        assert small["hidden_size"] // small["num_attention_heads"] == 128
        assert small["num_attention_heads"] == 4 * small["num_key_value_heads"]
        assert small["num_attention_heads"] % tp == 0
        assert shrink(configs.DEEPSEEK_V3, tp)["num_attention_heads"] % tp == 0


def test_widths_that_transformers_takes() -> None:
    smollm2 = configs.LLAMA | {"hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64}
    small = shrink(smollm2, 1)
    assert (small["num_attention_heads"], small["num_key_value_heads"], small["hidden_size"]) == (6, 2, 384)
    qwen3 = shrink(configs.LLAMA | {"hidden_size": 5120, "num_attention_heads": 40, "head_dim": 128}, 1)
    assert qwen3["hidden_size"] == qwen3["num_attention_heads"] * 128
    narrow = shrink(configs.LLAMA | {"hidden_size": 2048, "num_attention_heads": 48, "head_dim": 128}, 1)
    assert narrow["num_attention_heads"] == 12
    assert narrow["hidden_size"] % 12 == 0


def test_a_config_that_transformers_refuses(tmp_path: Path) -> None:
    config = configs.LLAMA | {"rope_scaling": {"rope_type": "llama3"}, "hidden_act": 3}
    made = twinmodel.make(configs.info(config, tmp_path), tmp_path / "twin", 1)
    assert made.reference is None
    assert "transformers refuses the config (" in made.notes[0]


def test_dense_and_expert_layers_are_both_there() -> None:
    text = shrink(configs.KIMI_K25, 1)["text_config"]
    assert text["first_k_dense_replace"] == 1
    assert shrink(configs.DEEPSEEK_V3, 1)["first_k_dense_replace"] == 3
    assert text["num_experts_per_tok"] == 8 < text["n_routed_experts"]


def test_vision_is_shrunk_alike() -> None:
    vision = shrink(configs.KIMI_K25, 1)["vision_config"]
    assert vision["vt_hidden_size"] == vision["hidden_size"] == vision["mm_hidden_size"] == 64
    assert vision["text_hidden_size"] == 256
    assert vision["patch_size"] == 14


def test_lists_of_layers_are_cut() -> None:
    kinds = ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 8
    assert shrink(configs.LLAMA | {"layer_types": kinds}, 1)["layer_types"] == kinds[:8]


def test_a_config_that_lacks_sizes() -> None:
    config = {key: value for key, value in configs.LLAMA.items() if key != "num_attention_heads"}
    with pytest.raises(UserError, match=r"num_attention_heads.*set server\.twin to false"):
        shrink(config, 1)


def test_weights_are_named_as_the_target_names_them(made: Twin) -> None:
    names = set(safetensors.torch.load_file(made.info.folder / "model.safetensors"))
    nested = "text_config" in made.info.config
    prefix = "language_model." if nested else ""
    assert {f"{prefix}model.embed_tokens.weight", f"{prefix}lm_head.weight", f"{prefix}model.norm.weight"} <= names
    if made.info.architecture != "LlamaForCausalLM":
        assert f"{prefix}model.layers.7.mlp.experts.31.down_proj.weight" in names
        assert f"{prefix}model.layers.0.mlp.down_proj.weight" in names
        assert f"{prefix}model.layers.7.mlp.gate.e_score_correction_bias" in names
    assert all(name.startswith(prefix) for name in names)
    assert [path.name for path in sorted(made.info.folder.iterdir())] == ["config.json", "model.safetensors"]


def test_names_are_taken_from_the_targets_own_files(tmp_path: Path) -> None:
    index = {"weight_map": {"model.language_model.embed_tokens.weight": "a", "lm_head.weight": "a"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert twinmodel.prefixes(configs.info(configs.KIMI_K25, tmp_path)) == ("model.language_model.", "lm_head.")


def test_equal_seeds_give_equal_weights_and_layers_differ(made: Twin) -> None:
    text = made.info.text_config
    again = twinmodel.build(text, made.info.architecture, 0).state_dict()
    other = twinmodel.build(text, made.info.architecture, 1)
    for name, tensor in made.reference.state_dict().items():
        assert torch.equal(tensor, again[name])
        assert torch.equal(tensor.bfloat16().float(), tensor)
    assert not torch.equal(made.reference.lm_head.weight, other.lm_head.weight)
    found, _ = twinmodel.states(made.reference, torch.arange(1, 60))
    assert len(found) == 9
    assert min(twinproofs.relative(one, next) for one, next in itertools.pairwise(found)) > 0.15


def test_states_are_the_layers_inputs(llama: Twin) -> None:
    taken = []
    layer = llama.reference.model.layers[5]
    hook = layer.register_forward_pre_hook(lambda module, args: taken.append(args[0][0]))
    found, _ = twinmodel.states(llama.reference, torch.arange(1, 20))
    hook.remove()
    assert torch.equal(taken[0], found[5])


def test_an_unknown_class_gets_no_weights(tmp_path: Path) -> None:
    config = configs.LLAMA | {"architectures": ["MagicForCausalLM"], "model_type": "magic"}
    made = twinmodel.make(configs.info(config, tmp_path), tmp_path / "twin", 1)
    assert made.reference is None
    assert "no layer's identity is proven: transformers does not know Magic" in made.notes[0]
    assert [path.name for path in (tmp_path / "twin").iterdir()] == ["config.json"]
    assert twin.twin_server(Server(), made.info, made).args["load-format"] == "dummy"
    twinmodel.write_draft(made, 1, None, tmp_path / "draft")


def test_the_users_flags_are_kept_but_for_sizes(llama: Twin) -> None:
    args: dict[str, Any] = {
        "attention-backend": "fa3",
        "mem-fraction-static": 0.92,
        "quantization": "fp8",
        "page-size": 128,
    }
    server = Server(url="http://x", captures=["/a"], port=1, tp=4, env={"A": "b"}, args=args)
    small = twin.twin_server(server, llama.info, llama)
    assert small.args["attention-backend"] == "fa3"
    assert small.args["chunked-prefill-size"] == 128
    assert "quantization" not in small.args
    assert small.args["mem-fraction-static"] == 0.5
    assert (small.tp, small.env, small.url, small.port, small.captures) == (4, {"A": "b"}, None, None, None)


def test_which_layers_a_twin_is_to_prove() -> None:
    info = configs.info(configs.LLAMA, Path("/nowhere"))
    assert twin.custom_layers(Capture(), info) is None
    assert twin.custom_layers(Capture(layers=[1, 15, 28], convention="layer_output"), info) is None
    assert twin.custom_layers(Capture(layers=[3, 17, 30], convention="sglang"), info) == (3, 17, 30)


def samples(made: Twin, layers: tuple[int, int, int]) -> dict[str, Sample]:
    found = {}
    for n in (3, 40, 20):
        ids = torch.arange(1, n + 1)
        all_states, _ = twinmodel.states(made.reference, ids)
        aux = torch.cat([all_states[layer] for layer in layers], -1)
        no = torch.zeros(n, dtype=torch.bool)
        found[str(n)] = Sample(str(n), ids, no, aux, all_states[-1], torch.full((n,), -1))
    return found


def test_layers_are_identified(made: Twin) -> None:
    found = Proven()
    checks = list(twinproofs.identity(made.reference, samples(made, (2, 4, 5)), (2, 4, 5), "cpu", found))
    assert all(check.passed for check in checks)
    assert list(found.layers) == ["hidden_states[2]", "hidden_states[4]", "hidden_states[5]", "last, normed"]
    assert found.exact


@pytest.mark.parametrize("taken", [(3, 4, 5), (2, 3, 5), (2, 4, 6)])
def test_one_layer_off_is_found(made: Twin, taken: tuple[int, int, int]) -> None:
    found = Proven()
    checks = list(twinproofs.identity(made.reference, samples(made, taken), (2, 4, 5), "cpu", found))
    assert sum(check.passed is False for check in checks) == 1
    assert all(check.remedy for check in checks if check.passed is False)
    assert not found.exact


def test_noise_above_the_tolerance_is_found(llama: Twin) -> None:
    noisy = samples(llama, (2, 4, 5))
    for sample in noisy.values():
        sample.aux.mul_(1 + 1e-4 * torch.randn_like(sample.aux))
    checks = list(twinproofs.identity(llama.reference, noisy, (2, 4, 5), "cpu", Proven()))
    assert [check.passed for check in checks] == [False, False, False, True]
    on_gpu = list(twinproofs.identity(llama.reference, noisy, (2, 4, 5), "cuda", Proven()))
    assert all(check.passed for check in on_gpu)


def test_one_foreign_row_is_found_and_a_tie_of_experts_forgiven(made: Twin) -> None:
    spoilt = samples(made, (2, 4, 5))
    spoilt["40"].aux[39] = spoilt["40"].aux[7]
    checks = list(twinproofs.identity(made.reference, spoilt, (2, 4, 5), "cpu", Proven()))
    assert [check.passed for check in checks] == [False, False, False, True]
    moved = samples(made, (2, 4, 5))
    moved["40"].aux[39] *= 1.05
    checks = list(twinproofs.identity(made.reference, moved, (2, 4, 5), "cpu", Proven()))
    assert [check.passed for check in checks] == [made.info.architecture != "LlamaForCausalLM"] * 3 + [True]


def test_answers_with_a_draft(llama: Twin) -> None:
    ids = list(range(1, 30))
    one = twinmodel.states(llama.reference, torch.tensor(ids))[1][-1].argsort(descending=True).tolist()
    plain, other = [[one[0], 3]], [[one[200], 3]]
    assert twinproofs.judge("n", llama, [ids], plain, plain, True).passed
    wrong = twinproofs.judge("n", llama, [ids], plain, other, False)
    assert wrong.passed is False
    assert "token 0 of an answer" in wrong.detail
    assert twinproofs.judge("n", llama, [ids], plain, [[one[0]]], False).passed is False


def test_the_draft_of_a_twin_is_complete(made: Twin, tmp_path: Path) -> None:
    twinmodel.write_draft(made, 1, (3, 5, 6), tmp_path / "draft")
    table = torch.nn.Embedding.from_pretrained(made.reference.get_input_embeddings().weight)
    draft = checkpoint.load(tmp_path / "draft", table)
    assert draft.config.draft_vocab_size == 512
    said = json.loads((tmp_path / "draft" / "config.json").read_text())
    ids = [2, 4, 5] if made.info.architecture == "LlamaForCausalLM" else [3, 5, 6]
    assert said["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == ids


def test_a_failed_check_ends_the_step() -> None:
    checks = [Check("a", True, "fine"), Check("b", None, "not tried"), Check("c", False, "broken", "mend it")]
    twin.require(checks[:2], "the twin")
    with pytest.raises(UserError, match="the twin: c failed: broken: mend it"):
        twin.require(checks, "the twin")


def test_a_server_that_does_not_start_is_a_failed_check(tmp_path: Path) -> None:
    info = configs.info(configs.LLAMA, tmp_path)
    found = twin.prove(info, Server(python="/no/such/python"), tmp_path / "work", Silent())
    assert [(check.name, check.passed) for check in found.checks] == [("the twin is captured from", False)]
    assert "/no/such/python" in found.checks[0].detail
