"""The EAGLE-3 draft model: parameters under the names that SGLang loads, and the arithmetic of one layer pass.

What attends to what is decided by the callers: `draft/unroll.py` (training and replay) and `decode/chain.py`
(generation with a key-value cache). Shapes: T slots, H hidden, D draft vocabulary, A query heads, G key-value heads,
E head size.
"""

import torch
from torch import nn

from eyas.draft import fused
from eyas.draft.config import DraftConfig
from eyas.draft.product import Projection
from eyas.draft.rotary import frequencies


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in float32 (or wider) as the targets do."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Norm over the last dimension; shape and dtype stay."""
        return fused.norm(x, self.weight, self.eps)


class Attention(nn.Module):
    """The projections; attention itself belongs to the caller."""

    def __init__(self, c: DraftConfig) -> None:
        super().__init__()
        self.q_proj = Projection(2 * c.hidden_size, c.num_attention_heads * c.head_dim)
        self.k_proj = Projection(2 * c.hidden_size, c.num_key_value_heads * c.head_dim)
        self.v_proj = Projection(2 * c.hidden_size, c.num_key_value_heads * c.head_dim)
        self.o_proj = Projection(c.num_attention_heads * c.head_dim, c.hidden_size)


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, c: DraftConfig) -> None:
        super().__init__()
        self.gate_proj = Projection(c.hidden_size, c.intermediate_size)
        self.up_proj = Projection(c.hidden_size, c.intermediate_size)
        self.down_proj = Projection(c.intermediate_size, c.hidden_size)

    def forward(self, x_TH: torch.Tensor) -> torch.Tensor:
        """[T, H] -> [T, H]."""
        return self.down_proj(fused.gated(self.gate_proj(x_TH), self.up_proj(x_TH)))


class Layer(nn.Module):
    """The only decoder layer; its two inputs have a norm each."""

    def __init__(self, c: DraftConfig) -> None:
        super().__init__()
        self.self_attn = Attention(c)
        self.mlp = MLP(c)
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.hidden_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)


class DraftModel(nn.Module):
    """EAGLE-3 (arXiv 2503.01840): three states of the target and the next token in, a guess at the token after out.

    `embed_tokens` is the target's, frozen, and no part of the checkpoint. `d2t` int64 [D] holds offsets:
    target id = draft id + d2t[draft id]; `t2d` bool [V] marks the target ids that the draft knows.
    """

    d2t: torch.Tensor
    t2d: torch.Tensor
    inverse_frequencies: torch.Tensor

    def __init__(self, c: DraftConfig, embed_tokens: nn.Embedding) -> None:
        super().__init__()
        if embed_tokens.weight.shape[1] != c.hidden_size:
            raise ValueError(
                f"embeddings of width {embed_tokens.weight.shape[1]} do not fit a draft of {c.hidden_size}"
            )
        self.config = c
        self.fc = Projection(3 * c.hidden_size, c.hidden_size)
        if c.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(c.hidden_size, c.rms_norm_eps) for _ in range(3))
        self.midlayer = Layer(c)
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.lm_head = Projection(c.hidden_size, c.draft_vocab_size)
        self.register_buffer("d2t", torch.zeros(c.draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.ones(c.vocab_size, dtype=torch.bool))
        self.embed_tokens = embed_tokens.requires_grad_(False)
        inverse, self.rotary_scale = frequencies(c.rope_parameters, c.head_dim, c.max_position_embeddings)
        self.register_buffer("inverse_frequencies", inverse, persistent=False)

    def work_in(self, dtype: torch.dtype) -> None:
        """Multiply inputs of `dtype` with copies of the weights in it; call again whenever the weights have changed."""
        modules = [m for m in self.modules() if isinstance(m, Projection)]
        if dtype == self.fc.weight.dtype:
            for module in modules:
                module.working = None
            return
        with torch.no_grad():
            for module in modules:
                if module.working is None or module.working.dtype != dtype:
                    module.working = torch.empty_like(module.weight, dtype=dtype)
                module.working.copy_(module.weight)

    def set_vocabulary(self, target_ids: torch.Tensor) -> None:
        """Take the sorted target ids [D] that the draft knows as its vocabulary."""
        size = self.config.draft_vocab_size
        assert target_ids.shape == (size,)
        assert bool((target_ids[1:] > target_ids[:-1]).all())
        self.d2t.copy_(target_ids - torch.arange(size, device=target_ids.device))
        self.t2d.zero_()
        self.t2d[target_ids] = True

    @property
    def target_ids(self) -> torch.Tensor:
        """The target id of each draft id, int64 [D]."""
        return self.d2t + torch.arange(self.config.draft_vocab_size, device=self.d2t.device)

    def fuse(self, aux_TC: torch.Tensor) -> torch.Tensor:
        """The captured states, [T, 3H] low to high, as one state `g` [T, H]. Once a chain: never for own states."""
        if self.config.fc_norm:
            parts = aux_TC.split(self.config.hidden_size, dim=-1)
            aux_TC = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return self.fc(aux_TC)

    def inputs(self, state_TH: torch.Tensor, next_ids_T: torch.Tensor) -> torch.Tensor:
        """Layer input [T, 2H]: the normed embedding of the next token first, then the normed state."""
        layer = self.midlayer
        weights = layer.input_layernorm.weight, layer.hidden_norm.weight
        return fused.norm_both(
            self.embed_tokens(next_ids_T), weights[0], state_TH, weights[1], self.config.rms_norm_eps
        )

    def angles(self, positions: torch.Tensor, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine [T, E] of the rotary embedding at `positions` [T], in float32; in float64 for such inputs."""
        wide = torch.float64 if like.dtype == torch.float64 else torch.float32
        turns = positions[:, None].to(wide) * self.inverse_frequencies.to(wide)
        turns = torch.cat([turns, turns], -1)
        return turns.cos() * self.rotary_scale, turns.sin() * self.rotary_scale

    def queries(self, x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Rotated queries [T, A, E] of layer inputs [T, 2H]."""
        return self._rotate(self.midlayer.self_attn.q_proj(x), angles)

    def keys_values(
        self, x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotated keys and values, each [T, G, E], of layer inputs [T, 2H]."""
        attn = self.midlayer.self_attn
        return self._rotate(attn.k_proj(x), angles), attn.v_proj(x).unflatten(-1, (-1, self.config.head_dim))

    def finish(self, attended_TAE: torch.Tensor, state_TH: torch.Tensor) -> torch.Tensor:
        """The rest of the layer after attention: the next state h' [T, H], before the final norm."""
        layer = self.midlayer
        residual_TH = layer.hidden_norm(state_TH) if self.config.norm_before_residual else state_TH
        update_TH = layer.self_attn.o_proj(attended_TAE.flatten(-2))
        weight = layer.post_attention_layernorm.weight
        hidden_TH, normed_TH = fused.add_norm(residual_TH, update_TH, weight, self.config.rms_norm_eps)
        return hidden_TH + layer.mlp(normed_TH)

    def hand_on(self, hidden_TH: torch.Tensor) -> torch.Tensor:
        """The state that the next step receives: h' itself; with EAGLE-3.1's `norm_output` the normed one."""
        return self.norm(hidden_TH) if self.config.norm_output else hidden_TH

    def logits(self, hidden_TH: torch.Tensor) -> torch.Tensor:
        """Logits [T, D] over the draft vocabulary."""
        return self.lm_head(self.norm(hidden_TH))

    def _rotate(self, flat: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return fused.rotate(flat.unflatten(-1, (-1, self.config.head_dim)), *angles)
