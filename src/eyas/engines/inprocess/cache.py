"""A key-value cache whose rows have lengths of their own, and attention over it.

One mechanism for batched generation and for speculative decoding: rows of a batch accept different numbers of tokens.
New entries are written at each row's own positions; what lies at or behind a row's length is never seen.
Shapes: B rows, Q new tokens, C capacity, G key-value heads, A query heads, E head size.
"""

from dataclasses import dataclass

import torch

FEW = 8
"""Up to so many new tokens plain products are faster than the fused attention (by 1.7 at 1, on two CPU cores)."""


@dataclass
class KVCache:
    """Keys and values of `layers` layers, each [B, G, C, E]; `lengths` int64 [B] tokens are valid in each row."""

    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    lengths: torch.Tensor

    @classmethod
    def empty(
        cls, layers: int, rows: int, heads: int, capacity: int, size: int, dtype: torch.dtype, device: torch.device
    ) -> "KVCache":
        """A cache with nothing in it."""

        def buffers() -> list[torch.Tensor]:
            return [torch.zeros(rows, heads, capacity, size, dtype=dtype, device=device) for _ in range(layers)]

        return cls(buffers(), buffers(), torch.zeros(rows, dtype=torch.int64, device=device))

    def view(self, rows: slice) -> "KVCache":
        """Some rows alone: keys and values that are written there appear here; its lengths are its own."""
        return KVCache([k[rows] for k in self.keys], [v[rows] for v in self.values], self.lengths[rows].clone())

    def spread_first_row(self, length: int) -> None:
        """Copy the first `length` entries of row 0 to all rows: a prefix that the rows share."""
        for buffer in (*self.keys, *self.values):
            buffer[1:, :, :length] = buffer[:1, :, :length]
        self.lengths.fill_(length)

    def select(self, rows: torch.Tensor) -> "KVCache":
        """A copy that holds only `rows` (int64 [b])."""
        return KVCache([k[rows] for k in self.keys], [v[rows] for v in self.values], self.lengths[rows])


@dataclass(frozen=True)
class Window:
    """Where Q new tokens of each row go, and what they see; the same for every layer of one pass."""

    cache: KVCache
    positions: torch.Tensor
    """int64 [B, Q]: the places of the new tokens."""
    seen: int
    """Entries of the cache that any of them sees."""

    @classmethod
    def behind(cls, cache: KVCache, new: int) -> "Window":
        """The next `new` places of every row."""
        positions = cache.lengths[:, None] + torch.arange(new, device=cache.lengths.device)
        return cls(cache, positions, int(positions.max()) + 1)

    def mask(self, groups: int, dtype: torch.dtype) -> torch.Tensor:
        """Additive mask [B, 1, groups * Q, seen]: 0 where a new token sees an entry, -inf elsewhere."""
        unseen = torch.arange(self.seen, device=self.positions.device) > self.positions[..., None]
        mask = torch.zeros(unseen.shape, dtype=dtype, device=unseen.device).masked_fill_(unseen, float("-inf"))
        return mask[:, None].repeat(1, 1, groups, 1)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor,
        scale: float | None = None,
    ) -> torch.Tensor:
        """Store `key` and `value` [B, G, Q, E] and attend with `query` [B, A, Q, E]; returns [B, Q, A, E].

        The query heads that share a key-value head are laid out as further query rows, so nothing is repeated.
        """
        rows = torch.arange(len(query), device=query.device)[:, None]
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        keys[rows, :, self.positions] = key.transpose(1, 2)
        values[rows, :, self.positions] = value.transpose(1, 2)
        batch, heads, new, size = query.shape
        grouped = query.reshape(batch, key.shape[1], -1, size)
        seen_keys, seen_values = keys[:, :, : self.seen], values[:, :, : self.seen]
        if new <= FEW:
            scores = (grouped * (size**-0.5 if scale is None else scale)) @ seen_keys.transpose(2, 3)
            out = (scores + mask).softmax(-1) @ seen_values
        else:
            out = torch.nn.functional.scaled_dot_product_attention(
                grouped, seen_keys, seen_values, attn_mask=mask, scale=scale
            )
        return out.reshape(batch, heads, new, size).transpose(1, 2)
