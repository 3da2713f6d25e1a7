"""Where a draft's weights begin.

`random` is what the recipe asks: small random weights, the lm_head rows and the final norm of the target. `fitted`
replaces most of what the first few hundred optimizer steps would find by one ridge regression. The state that the
target will have one token on, last[t+1], is predicted linearly from what slot t reads: the three captured states and
the embedding of x[t+1]. The states' part of the solution becomes `fc`. The embedding's part has to pass through
attention, the only place of the layer where the embedding enters: its best approximation of rank G*E becomes v_proj and
o_proj, and one query head of each group is made to look at its own slot, by a query and a key that are constant in the
rotary dimensions that turn fastest. The MLP is the target's last one, made quiet. Everything stays trainable.
Measurements: `docs/log.md`.
"""

import math

import torch
from torch import nn

from eyas.draft.model import DraftModel

STD = 0.02
QUIET = 0.1
"""Of the MLP's output at the start, so that it does not disturb the fit."""
MOST = 16384
"""Positions that the regression uses."""
RIDGE = 1e-2
FAST = 4
"""Rotary dimensions that hold the look at the own slot."""
SHARP = 32.0
"""Attention score of that look."""


@torch.no_grad()
def random(draft: DraftModel, head_DH: torch.Tensor, final_norm_H: torch.Tensor, generator: torch.Generator) -> None:
    """Small random matrices, norms of 1, the target's lm_head rows and final norm."""
    for parameter in draft.parameters():
        if parameter.requires_grad and parameter.dim() == 2:
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * STD)
    draft.lm_head.weight.copy_(head_DH)
    draft.norm.weight.copy_(final_norm_H)


@torch.no_grad()
def fitted(
    draft: DraftModel,
    aux_NC: torch.Tensor,
    next_ids_N: torch.Tensor,
    next_last_NH: torch.Tensor,
    last_mlp: dict[str, torch.Tensor] | None = None,
) -> None:
    """Fit a draft that `random` has prepared, at N sampled positions t.

    `aux_NC` [N, 3H]: captured states at t; `next_ids_N`: x[t+1]; `next_last_NH`: the target's normed last state at t+1;
    `last_mlp`: gate_proj, up_proj, down_proj and norm of the target's last layer.
    """
    if draft.config.fc_norm:
        parts = aux_NC.split(draft.config.hidden_size, dim=-1)
        aux_NC = torch.cat([norm(part.float()) for norm, part in zip(draft.fc_norm, parts, strict=True)], dim=-1)
    goal_NH = next_last_NH.double() / _away_from_zero(draft.norm.weight.double())
    embed_NH = _unit(draft.embed_tokens(next_ids_N).double())
    scale_C = aux_NC.double().square().mean(0).sqrt().clamp_min(1e-12)
    weights = _ridge(torch.cat([aux_NC.double() / scale_C, embed_NH], -1), goal_NH, RIDGE)
    from_aux, from_embed = weights[: len(scale_C)] / scale_C[:, None], weights[len(scale_C) :]
    draft.fc.weight.copy_(from_aux.T)
    _look_at_own_slot(draft, embed_NH, _unit(aux_NC.double() @ from_aux), from_embed)
    mlp = draft.midlayer.mlp
    if last_mlp is not None and last_mlp["gate_proj"].shape == mlp.gate_proj.weight.shape:
        for name in ("gate_proj", "up_proj", "down_proj"):
            getattr(mlp, name).weight.copy_(last_mlp[name])
        draft.midlayer.post_attention_layernorm.weight.copy_(last_mlp["norm"])
    mlp.down_proj.weight.mul_(QUIET)


def _look_at_own_slot(
    draft: DraftModel, embed_NH: torch.Tensor, state_NH: torch.Tensor, from_embed: torch.Tensor
) -> None:
    c, attention = draft.config, draft.midlayer.self_attn
    groups, size = c.num_key_value_heads, c.head_dim
    contribution = embed_NH @ from_embed
    directions = torch.linalg.eigh(contribution.T @ contribution).eigenvectors.flip(1)[:, : groups * size]
    directions = nn.functional.pad(directions, (0, groups * size - directions.shape[1]))  # [H, G*E]
    attention.v_proj.weight.zero_()
    attention.v_proj.weight[:, : c.hidden_size] = (from_embed @ directions).T.to(attention.v_proj.weight.dtype)
    inputs = torch.cat([embed_NH, state_NH], -1)
    constant = _ridge(inputs, torch.ones(len(inputs), 1, dtype=inputs.dtype, device=inputs.device), RIDGE / 10)[:, 0]
    fast = min(FAST, size // 2)
    row = (math.sqrt(SHARP * math.sqrt(size) / fast) * constant).to(attention.q_proj.weight.dtype)
    shared = c.num_attention_heads // groups
    query = attention.q_proj.weight.view(groups, shared, size, -1)
    query[:, 0, :fast] = row
    attention.k_proj.weight.view(groups, size, -1)[:, :fast] = row
    output = attention.o_proj.weight.view(c.hidden_size, groups, shared, size)
    output[:, :, 0] = directions.view(c.hidden_size, groups, size).to(output.dtype)


def _ridge(inputs: torch.Tensor, goals: torch.Tensor, strength: float) -> torch.Tensor:
    gram = inputs.T @ inputs
    gram.diagonal().add_(strength * len(inputs))
    return torch.linalg.solve(gram, inputs.T @ goals)


def _unit(x: torch.Tensor) -> torch.Tensor:
    """Rows of root mean square 1, as a fresh RMSNorm gives them."""
    return x / x.square().mean(-1, keepdim=True).sqrt().clamp_min(1e-12)


def _away_from_zero(weight: torch.Tensor) -> torch.Tensor:
    floor = 1e-3 * weight.abs().mean()
    return torch.where(weight.abs() < floor, torch.full_like(weight, math.inf), weight)
