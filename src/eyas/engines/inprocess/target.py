"""The target in this process: loaded once, run over a ragged cache, its hidden states tapped where they pass.

The tapped states are real `hidden_states` positions: position i is the input of layer i, the full residual stream; the
last state is taken after the final norm. Attention is registered with transformers as an attention function of our
own, so the model code stays theirs and the cache is ours.
"""

from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn

from eyas.engines.inprocess.cache import KVCache, Window
from eyas.engines.target import TargetInfo
from eyas.errors import UserError


def _attention(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, **extra: Any
) -> tuple[torch.Tensor, None]:
    window: Window = extra["window"]
    layer: Any = module.layer_idx
    return window.attend(layer, query, key, value, mask, extra.get("scaling")), None


transformers.AttentionInterface.register("eyas", _attention)
transformers.utils.logging.disable_progress_bar()


@dataclass(frozen=True)
class Pass:
    """What one pass gives: `last` [B, Q, H] after the final norm; `aux` [B, Q, 3H] for three layers, low to high."""

    last: torch.Tensor
    aux: torch.Tensor


class InProcessTarget:
    """A loaded target.

    `layers` are hidden_states positions, for a draft three. Raises UserError where the model cannot be loaded.
    """

    def __init__(self, info: TargetInfo, layers: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self.info, self.layers, self.dtype, self.device = info, layers, dtype, device
        try:
            self.model: Any = transformers.AutoModelForCausalLM.from_pretrained(
                info.folder, dtype=dtype, attn_implementation="eyas", local_files_only=True
            )
        except (OSError, ValueError, RuntimeError, KeyError) as error:
            first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise UserError(f"{info.folder}: transformers cannot load this model ({first})") from error
        self.model.eval().requires_grad_(False).to(device)
        config = self.model.config
        self._groups = config.num_attention_heads // config.num_key_value_heads
        self._heads = config.num_key_value_heads
        self._size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        window = getattr(config, "sliding_window", None)
        self.longest = min(config.max_position_embeddings, window or config.max_position_embeddings)
        self._taps: dict[int, torch.Tensor] = {}
        for position in layers:
            self.model.model.layers[position].register_forward_pre_hook(self._tap(position))

    def _tap(self, position: int) -> Any:
        def keep(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            self._taps[position] = args[0]

        return keep

    @property
    def head(self) -> torch.Tensor:
        """lm_head weights [V, H]."""
        weight: torch.Tensor = self.model.lm_head.weight
        return weight

    @property
    def embedding(self) -> nn.Embedding:
        """The input embeddings [V, H]."""
        table: nn.Embedding = self.model.model.embed_tokens
        return table

    def cache(self, rows: int, capacity: int, spare: int = 0) -> KVCache:
        """An empty cache. Raises UserError where `capacity` is more than the target can attend to.

        `spare` more places are for drafts that may turn out to lie behind an answer's end.
        """
        if capacity > self.longest:
            raise UserError(
                f"a row of {capacity} tokens is longer than the target's context ({self.longest}): "
                "lower answers.max_new_tokens or shorten the prompts"
            )
        layers = self.model.config.num_hidden_layers
        return KVCache.empty(layers, rows, self._heads, capacity + spare, self._size, self.dtype, self.device)

    @torch.inference_mode()
    def run(self, ids: torch.Tensor, cache: KVCache) -> Pass:
        """Run `ids` int64 [B, Q] behind what the cache holds; the caller then sets the cache's lengths.

        Rows shorter than Q are padded at the end with any id; their outputs there mean nothing.
        """
        window = Window.behind(cache, ids.shape[1])
        self._taps.clear()
        last = self.model.model(
            input_ids=ids,
            attention_mask=window.mask(self._groups, self.dtype),
            position_ids=window.positions,
            use_cache=False,
            window=window,
        ).last_hidden_state
        aux = torch.cat([self._taps[position] for position in self.layers], -1)
        self._taps.clear()
        return Pass(last, aux)

    @torch.inference_mode()
    def greedy(self, last: torch.Tensor) -> torch.Tensor:
        """The target's choice after states [..., H]: int64 [...]."""
        return (last @ self.head.T).argmax(-1)
