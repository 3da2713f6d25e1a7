"""The shape of a draft, and its two-way translation to the config.json that serving engines read.

Stands between the target's config and `draft/model.py`; no torch here.
"""

from dataclasses import dataclass
from typing import Any

from eyas.errors import UserError

ARCHITECTURE = "LlamaForCausalLMEagle3"
DEFAULT_THETA = 10000.0
SWITCHES = ("fc_norm", "norm_output", "norm_before_residual")
"""Fields of DraftConfig that change the arithmetic; a config.json says those that are on."""


@dataclass(frozen=True)
class DraftConfig:
    """Sizes and switches of an EAGLE-3 draft.

    `hidden_size` H is the target's; `vocab_size` V the target's; `draft_vocab_size` D the draft's own.
    """

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    rms_norm_eps: float
    rope_parameters: dict[str, Any]
    max_position_embeddings: int
    fc_norm: bool = False
    norm_output: bool = False
    norm_before_residual: bool = False
    """The residual is the state after its norm: drafts that speculators trained, for vLLM; SGLang does not know it."""

    def __post_init__(self) -> None:
        if not 0 < self.draft_vocab_size <= self.vocab_size:
            raise UserError(
                f"draft.vocab_size {self.draft_vocab_size} is not within 1..{self.vocab_size}, the target's vocabulary"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise UserError(
                f"{self.num_attention_heads} attention heads cannot share {self.num_key_value_heads} key-value heads"
            )

    @classmethod
    def from_target(cls, target: dict[str, Any], draft_vocab_size: int | str, **switches: bool) -> "DraftConfig":
        """Shape of a draft for a target, from the target's config.json (a nested `text_config` is looked into).

        Every size is the target's own layer's; `switches` are those of the class. Raises UserError where the config
        lacks a size.
        """
        text = target.get("text_config", target)
        try:
            heads = int(text["num_attention_heads"])
            hidden = int(text["hidden_size"])
            vocab = int(text["vocab_size"])
            return cls(
                hidden_size=hidden,
                intermediate_size=int(text["intermediate_size"]),
                num_attention_heads=heads,
                num_key_value_heads=int(text.get("num_key_value_heads") or heads),
                head_dim=int(text.get("head_dim") or hidden // heads),
                vocab_size=vocab,
                draft_vocab_size=vocab if draft_vocab_size == "full" else min(int(draft_vocab_size), vocab),
                rms_norm_eps=float(text.get("rms_norm_eps", 1e-6)),
                rope_parameters=rope_parameters(text),
                max_position_embeddings=int(text.get("max_position_embeddings", 2048)),
                **switches,
            )
        except KeyError as error:
            raise UserError(f"config.json has no {error.args[0]}; this architecture is not supported") from error

    def to_hf(self, dtype: str) -> dict[str, Any]:
        """The draft's config.json: SGLang's and vLLM's spelling, rope in the old and the new one.

        Both engines read the switches at the top level; other tools look for EAGLE-3.1's two in `eagle_config`.
        """
        rope = dict(self.rope_parameters)
        old = {k: v for k, v in rope.items() if k != "rope_theta"}
        if "rope_type" in old:
            old["type"] = old["rope_type"]
        switches = {name: True for name in SWITCHES if getattr(self, name)}
        return {
            "architectures": [ARCHITECTURE],
            "model_type": "llama",
            "torch_dtype": dtype,
            "dtype": dtype,
            "hidden_size": self.hidden_size,
            "target_hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": 1,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "vocab_size": self.vocab_size,
            "draft_vocab_size": self.draft_vocab_size,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": rope.get("rope_theta", DEFAULT_THETA),
            "rope_scaling": None if old.get("rope_type", "default") == "default" else old,
            "rope_parameters": rope,
            "max_position_embeddings": self.max_position_embeddings,
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
            **switches,
            "eagle_config": {"use_aux_hidden_state": True, **switches},
        }

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> "DraftConfig":
        """Read a draft's config.json, ours or another tool's; that of speculators nests the layer's sizes.

        Raises UserError for one that is no EAGLE-3 draft.
        """
        if "Eagle3" not in " ".join(config.get("architectures") or []):
            raise UserError(f"architectures {config.get('architectures')} is no EAGLE-3 draft; expected {ARCHITECTURE}")
        layer = config.get("transformer_layer_config") or config
        return cls.from_target(layer, config.get("draft_vocab_size") or "full", **read_switches(config))


def read_switches(config: dict[str, Any]) -> dict[str, bool]:
    """The switches of a draft's config.json, wherever it has them."""
    eagle = config.get("eagle_config") or {}
    by_default = {"norm_before_residual": "speculators_model_type" in config}  # as speculators itself reads it
    return {name: bool(config.get(name, eagle.get(name, by_default.get(name)))) for name in SWITCHES}


def rope_parameters(config: dict[str, Any]) -> dict[str, Any]:
    """Rotary parameters of a config.json in the new spelling, whichever one it uses [SpecForge 270, sfllm 32]."""
    rope = dict(config.get("rope_parameters") or {})
    if not rope:
        rope = dict(config.get("rope_scaling") or {})
        kind = rope.pop("type", None)
        rope.setdefault("rope_type", kind or "default")
        rope["rope_theta"] = config.get("rope_theta", DEFAULT_THETA)
    rope.setdefault("rope_type", "default")
    rope.setdefault("rope_theta", config.get("rope_theta", DEFAULT_THETA))
    return rope
