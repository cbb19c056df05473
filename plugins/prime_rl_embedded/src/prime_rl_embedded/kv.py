"""The KV cache: one slot a running request, grown only as far as requests reach.

Shapes: S = slots, G = key/value heads, C = capacity in tokens, D = head dimension, N = tokens of
one forward.
"""

from __future__ import annotations

import torch
from torch import Tensor

_FIRST_SLOTS = 8
_FIRST_CAPACITY = 128


class KVCache:
    """Keys and values of every layer, one ``[2, S, G, C, D]`` tensor a layer.

    Starts small and doubles, so that a large ``max_model_len`` costs memory only when a request
    gets there. The ceiling is ``max_slots * max_len`` tokens. Fresh memory is zero: masked
    positions must stay finite.
    """

    def __init__(
        self,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        max_slots: int,
        max_len: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
    ) -> None:
        self.num_kv_heads, self.head_dim = num_kv_heads, head_dim
        self.max_slots, self.max_len = max_slots, max_len
        self.slots = min(_FIRST_SLOTS, max_slots)
        self.capacity = min(_FIRST_CAPACITY, max_len)
        shape = (2, self.slots, num_kv_heads, self.capacity, head_dim)
        self.layers = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self._head_offsets = torch.arange(num_kv_heads, device=device)

    @property
    def max_bytes(self) -> int:
        """Memory at the ceiling."""
        now = sum(layer.numel() * layer.element_size() for layer in self.layers)
        return now * self.max_slots * self.max_len // (self.slots * self.capacity)

    def reserve(self, slots: int, length: int) -> None:
        """Make room for ``slots`` rows of ``length``. Layer by layer: the peak stays low."""
        slots, length = self._grown(slots, length)
        if (slots, length) == (self.slots, self.capacity):
            return
        for i, old in enumerate(self.layers):
            new = old.new_zeros((2, slots, self.num_kv_heads, length, self.head_dim))
            new[:, : self.slots, :, : self.capacity] = old
            self.layers[i] = new
        self.slots, self.capacity = slots, length

    def _grown(self, slots: int, length: int) -> tuple[int, int]:
        assert slots <= self.max_slots and length <= self.max_len, "the scheduler admits no more"
        new_slots, new_length = self.slots, self.capacity
        while new_slots < slots:
            new_slots = min(2 * new_slots, self.max_slots)
        while new_length < length:
            new_length = min(2 * new_length, self.max_len)
        return new_slots, new_length

    def write_index(self, rows: Tensor, positions: Tensor) -> Tensor:
        """[N * G]: where keys go in ``layer[0].view(-1, D)``. Rows, positions: [N]."""
        heads = rows[:, None] * self.num_kv_heads + self._head_offsets
        return (heads * self.capacity + positions[:, None]).view(-1)

    def write(self, layer: int, index: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store N tokens. Keys, values: ``[N, G, D]``; index from ``write_index``."""
        stored = self.layers[layer]
        stored[0].view(-1, self.head_dim).index_copy_(0, index, keys.reshape(-1, self.head_dim))
        stored[1].view(-1, self.head_dim).index_copy_(0, index, values.reshape(-1, self.head_dim))

    def copy_row(self, source: int, target: int, length: int) -> None:
        """Copy the first ``length`` tokens of one row over another's."""
        for layer in self.layers:
            layer[:, target, :, :length] = layer[:, source, :, :length]

    def clear_row(self, row: int) -> None:
        """Zero a row with non-finite values, which would leak through masks: 0 * nan is nan."""
        for layer in self.layers:
            layer[:, row] = 0
