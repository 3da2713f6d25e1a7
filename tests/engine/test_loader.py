"""SGLang's own draft class, asked for the tensors that it takes: no server is started."""

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

from eyas.draft import checkpoint
from eyas.draft.config import DraftConfig
from eyas.draft.model import DraftModel
from eyas.engines.sglang.loader import Loader


@pytest.mark.parametrize("switches", [{}, {"fc_norm": True, "norm_output": True}])
def test_what_is_exported_is_what_sglang_loads(
    tmp_path: Path, tiny_llama: Path, sglang_python: str, switches: dict[str, bool]
) -> None:
    config = json.loads((tiny_llama / "config.json").read_text())
    shape = DraftConfig.from_target(config, 50, **switches)
    draft = DraftModel(shape, nn.Embedding(shape.vocab_size, shape.hidden_size))
    draft.set_vocabulary(torch.arange(0, 100, 2))
    checkpoint.save(tmp_path, draft, torch.float32)
    found = Loader(tmp_path, sglang_python).check()
    assert (found.passed, found.detail[:6]) == (True, "SGLang")
    state = safetensors.torch.load_file(tmp_path / "model.safetensors")
    del state["lm_head.weight"]
    safetensors.torch.save_file({**state, "midlayer.foo": torch.ones(1)}, tmp_path / "model.safetensors")
    found = Loader(tmp_path, sglang_python).check()
    assert found.passed is False
    assert "ignores midlayer.foo" in found.detail
    assert "leaves lm_head.weight uninitialised" in found.detail
