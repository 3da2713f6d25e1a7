"""The in-process engine against transformers' own generation and hidden states."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from eyas.engines import target as targets
from eyas.engines.inprocess.generate import _shared_prefix, answer
from eyas.engines.inprocess.target import InProcessTarget
from eyas.errors import UserError
from eyas.progress import Silent

LAYERS = (2, 4, 5)


def load(folder, layers=LAYERS):
    return InProcessTarget(targets.inspect(str(folder), Silent()), layers, torch.float32, torch.device("cpu"))


def prompts(count=7, shared=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    start = list(range(5, 5 + shared))
    return [start + torch.randint(3, 250, (2 + 3 * (i % 4),), generator=generator).tolist() for i in range(count)]


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "mistral"])
def test_answers_and_states_equal_transformers(make_tiny, architecture):
    folder = make_tiny(architecture)
    target = load(folder)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for answered in answer(target, prompts(), 12, capture=torch.float32):
        ids = torch.tensor([answered.ids])
        wanted = plain.generate(
            ids[:, : answered.prompt], attention_mask=torch.ones(1, answered.prompt), max_new_tokens=12, do_sample=False
        )
        assert answered.ids == wanted[0].tolist()
        with torch.no_grad():
            out = plain(ids, output_hidden_states=True)
        aux = torch.cat([out.hidden_states[layer][0] for layer in LAYERS], -1)
        torch.testing.assert_close(answered.aux, aux, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(answered.last, out.hidden_states[-1][0], rtol=1e-4, atol=1e-4)
        argmax = out.logits[0].argmax(-1)[answered.prompt - 1 : -1]
        assert answered.argmax[answered.prompt - 1 : -1].tolist() == argmax.tolist()
        assert answered.argmax[answered.prompt - 1 : -1].tolist() == answered.ids[answered.prompt :]


def test_rows_leave_when_they_end_and_order_is_kept(tiny_llama):
    target = load(tiny_llama)
    asked = prompts(9)
    alone = [answer(target, [p], 20)[0].ids for p in asked]
    assert [a.ids for a in answer(target, asked, 20)] == alone


def test_a_prompt_that_is_the_beginning_of_another(tiny_llama):
    target = load(tiny_llama)
    asked = [[5, 6, 7], [5, 6, 7, 8, 9], [5, 6, 7]]
    assert _shared_prefix(asked) == 2
    assert [a.ids for a in answer(target, asked, 6)] == [answer(target, [p], 6)[0].ids for p in asked]


def test_a_row_beyond_the_context_is_refused(tiny_llama):
    with pytest.raises(UserError, match=r"context \(512\).*max_new_tokens"):
        answer(load(tiny_llama), [list(range(3, 200))], 400)


def test_a_model_whose_weights_do_not_fit_its_config_is_refused(tiny_llama, tmp_path):
    import json
    import shutil

    folder = tmp_path / "broken"
    shutil.copytree(tiny_llama, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 100}))
    with pytest.raises(UserError, match="cannot load"):
        load(folder)
