"""The recipe written out slot by slot, in float64, with nothing shared with the package: what the unroll must equal."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Shape:
    """Sizes that the parameters do not tell."""

    heads: int
    groups: int
    size: int
    theta: float
    eps: float
    fc_norm: bool = False
    norm_output: bool = False


def norm(x, weight, eps):
    return x / torch.sqrt((x * x).mean() + eps) * weight


def rope(heads, position, theta):
    """Rotate each row of [heads, size], first half against second half."""
    size = heads.shape[1]
    half = size // 2
    out = []
    for i in range(half):
        angle = torch.tensor(position * theta ** (-2 * i / size), dtype=torch.float64)
        out.append(heads[:, i] * angle.cos() - heads[:, i + half] * angle.sin())
    for i in range(half):
        angle = torch.tensor(position * theta ** (-2 * i / size), dtype=torch.float64)
        out.append(heads[:, i + half] * angle.cos() + heads[:, i] * angle.sin())
    return torch.stack(out, 1)


class Slotwise:
    """One document: the states, keys and values of every slot and step, computed when asked for."""

    def __init__(self, p, shape, embed, ids, aux):
        self.p, self.shape, self.embed, self.ids, self.aux = p, shape, embed, ids, aux
        self.kept = {}

    def fused(self, t):
        chunks = self.aux[t].chunk(3)
        if self.shape.fc_norm:
            chunks = [norm(c, self.p[f"fc_norm.{i}.weight"], self.shape.eps) for i, c in enumerate(chunks)]
        return self.p["fc.weight"] @ torch.cat(list(chunks))

    def state(self, t, k):
        """What step k reads at slot t."""
        if k == 0:
            return self.fused(t)
        before = self.hidden(t, k - 1)
        return norm(before, self.p["norm.weight"], self.shape.eps) if self.shape.norm_output else before

    def x(self, t, k):
        token = norm(self.embed[self.ids[t + 1 + k]], self.p["midlayer.input_layernorm.weight"], self.shape.eps)
        state = norm(self.state(t, k), self.p["midlayer.hidden_norm.weight"], self.shape.eps)
        return torch.cat([token, state])

    def project(self, name, t, k, heads, rotated):
        flat = self.p[f"midlayer.self_attn.{name}_proj.weight"] @ self.x(t, k)
        shaped = flat.view(heads, self.shape.size)
        return rope(shaped, t + k, self.shape.theta) if rotated else shaped

    def hidden(self, t, k):
        if (t, k) not in self.kept:
            self.kept[t, k] = self._hidden(t, k)
        return self.kept[t, k]

    def _hidden(self, t, k):
        s, p = self.shape, self.p
        query = self.project("q", t, k, s.heads, True)
        places = [(u, 0) for u in range(t + 1)] + [(t, j) for j in range(1, k + 1)]
        keys = [self.project("k", u, j, s.groups, True) for u, j in places]
        values = [self.project("v", u, j, s.groups, False) for u, j in places]
        attended = []
        for head in range(s.heads):
            group = head // (s.heads // s.groups)
            scores = torch.stack([query[head] @ key[group] / s.size**0.5 for key in keys])
            weights = scores.softmax(0)
            attended.append(sum(w * value[group] for w, value in zip(weights, values, strict=True)))
        h = self.state(t, k) + p["midlayer.self_attn.o_proj.weight"] @ torch.cat(attended)
        m = norm(h, p["midlayer.post_attention_layernorm.weight"], s.eps)
        gate, up = p["midlayer.mlp.gate_proj.weight"] @ m, p["midlayer.mlp.up_proj.weight"] @ m
        return h + p["midlayer.mlp.down_proj.weight"] @ (gate / (1 + torch.exp(-gate)) * up)

    def logits(self, t, k):
        return self.p["lm_head.weight"] @ norm(self.hidden(t, k), self.p["norm.weight"], self.shape.eps)


def counts(answer, t, k):
    """Does slot t of a document count at step k?"""
    return t + 2 + k < len(answer) and all(bool(answer[i]) for i in range(t + 1, t + 3 + k))


def loss(p, shape, embed, head, target_ids, documents, steps, decay):
    """The loss over documents of (ids, answer, aux, last, argmax); `head` [V, H] is the whole of the target's."""
    total = torch.zeros((), dtype=torch.float64)
    known = set(target_ids.tolist())
    for k in range(steps):
        summed, counted = torch.zeros((), dtype=torch.float64), 0
        for ids, answer, aux, last, argmax in documents:
            slots = Slotwise(p, shape, embed, ids, aux)
            for t in range(len(ids)):
                if not counts(answer, t, k):
                    continue
                counted += 1
                if int(argmax[t + 1 + k]) in known:
                    wanted = (head @ last[t + 1 + k])[target_ids].softmax(0)
                    summed = summed - (wanted * slots.logits(t, k).log_softmax(0)).sum()
        if counted:
            total = total + decay**k * summed / counted
    return total
