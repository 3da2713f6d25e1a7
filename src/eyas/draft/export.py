"""The export step: a trained draft becomes the folder that a serving engine loads, checked by loading it again."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from eyas import datafiles
from eyas.capture.contract import Contract
from eyas.config import Answers, Prompts, Target
from eyas.digests import digest_file
from eyas.draft import checkpoint, verify
from eyas.draft.model import DraftModel
from eyas.engines import target as targets
from eyas.engines import weights
from eyas.engines.sglang.checks import Check
from eyas.engines.sglang.layers import to_eagle_config
from eyas.errors import UserError
from eyas.files import write_atomic
from eyas.progress import Progress
from eyas.spec import StepSpec
from eyas.store.store import FeatureStore


def run(spec: StepSpec, out: Path, progress: Progress) -> dict[str, Any]:
    """Step entry. The draft takes the dtype of the target's own weights."""
    info = targets.read(spec.inputs["target"])
    store = FeatureStore.open(spec.inputs["capture"] / "train", target=info)
    contract = store.contract
    stored = weights.embedding(info.folder)
    dtype, embedding = stored.dtype, nn.Embedding.from_pretrained(stored.float())
    trained = checkpoint.load(spec.inputs["train"] / "draft", embedding)
    extra: dict[str, Any] = {
        "eyas": {"contract": contract.to_dict(), "heldout": heldout(spec)},
        "eos_token_id": list(info.eos_token_ids),
    }
    eagle = trained.config.to_hf(str(dtype))["eagle_config"]
    extra |= layer_ids(eagle, contract.layers, info.architecture, info.num_layers)
    progress.milestone("writing and checking")
    checkpoint.save(out, trained, dtype, extra)
    again = checkpoint.load(out, embedding, torch.float32)
    check_equal(trained, again, dtype)
    require(verify.checks(out, info))
    write_atomic(out / "README.md", card(info, again, contract))
    parameters = sum(t.numel() for name, t in checkpoint.tensors(again).items() if name not in ("d2t", "t2d"))
    return {
        "digest": digest_file(out / checkpoint.WEIGHTS),
        "tensors": len(checkpoint.names(again.config)),
        "parameters": parameters,
        "dtype": str(dtype).removeprefix("torch."),
    }


def require(checks: list[Check]) -> None:
    """Raises UserError for the first failed check of what was written, against the target."""
    for check in checks:
        if check.passed is False:
            raise UserError(f"export: {check.name}: {check.detail}: {check.remedy}")


def heldout(spec: StepSpec) -> dict[str, Any]:
    """How the held-out answers came about, so that `eyas replay` gives the run's figure again."""
    prompts, answers = spec.section(Prompts), spec.section(Answers)
    return {
        "prompts": datafiles.absolute(prompts.heldout),
        "limit": prompts.heldout_limit,
        "max_new_tokens": answers.heldout_max_new_tokens or answers.max_new_tokens,
        "chat_template_kwargs": spec.section(Target).chat_template_kwargs,
    }


def layer_ids(
    eagle_config: dict[str, Any], layers: tuple[int, int, int], architecture: str, num_layers: int
) -> dict[str, Any]:
    """Both spellings of the hidden_states indices `layers`: vLLM's at the top level, SGLang's in eagle_config.

    Nothing where they are the default, since every engine reads that absence alike. Raises UserError for layers that
    SGLang cannot be told to take.
    """
    ids = to_eagle_config(layers, architecture, num_layers)
    if ids is None:
        return {}
    return {
        "eagle_aux_hidden_state_layer_ids": list(layers),
        "eagle_config": eagle_config | {"eagle_aux_hidden_state_layer_ids": ids},
    }


@torch.inference_mode()
def check_equal(trained: DraftModel, again: DraftModel, written: torch.dtype) -> None:
    """What was read back computes what was trained, up to the written dtype's resolution; both drafts in float32.

    Raises UserError where it does not.
    """
    generator = torch.Generator().manual_seed(0)
    size = trained.config.hidden_size
    state = torch.randn(4, 3 * size, generator=generator)
    ids = torch.randint(0, trained.config.vocab_size, (4,), generator=generator)

    def logits(draft: DraftModel) -> torch.Tensor:
        fused = draft.fuse(state)
        x = draft.inputs(fused, ids)
        angles = draft.angles(torch.zeros(4, dtype=torch.int64), x)
        _, value = draft.keys_values(x, angles)
        repeat = draft.config.num_attention_heads // draft.config.num_key_value_heads
        return draft.logits(draft.finish(value.repeat_interleave(repeat, 1), fused))

    one, other = logits(trained), logits(again)
    error = float((one - other).norm() / one.norm())
    if not error < 16 * torch.finfo(written).eps:
        raise UserError(f"export: the written draft computes something else (relative difference {error:.2e})")
    if not torch.equal(trained.target_ids, again.target_ids):
        raise UserError("export: the vocabulary map changed in writing")
    if not torch.equal(trained.inverse_frequencies, again.inverse_frequencies):
        raise UserError("export: rotary frequencies changed in writing; rope_parameters are incomplete")


def card(info: targets.TargetInfo, draft: DraftModel, contract: Contract) -> str:
    """README.md of the exported folder."""
    c = draft.config
    return f"""# EAGLE-3 draft for {info.folder.name}

Trained and exported by eyas. One layer, width {c.hidden_size}, {c.draft_vocab_size} of {c.vocab_size} tokens,
hidden states {list(contract.layers)} (positions in the list of all hidden states, 0 being the embedding).
Serves contexts up to {c.max_position_embeddings} tokens; it was trained on what the run folder's store holds.

    python -m sglang.launch_server --model-path TARGET --speculative-algorithm EAGLE3 \\
        --speculative-draft-model-path DRAFT --speculative-num-steps 3 --speculative-eagle-topk 1 \\
        --speculative-num-draft-tokens 4

    vllm serve TARGET --speculative-config '{{"method": "eagle3", "model": "DRAFT", "num_speculative_tokens": 3}}'

`eyas verify DRAFT --target TARGET` checks these files; `eyas diagnose` finds out why a server accepts too little.
"""
