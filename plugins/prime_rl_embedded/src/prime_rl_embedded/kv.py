"""The KV cache: one slot per running request, grown on demand.

Shapes: S = slots, G = key/value heads, C = capacity in tokens, D = head dimension (the larger of
keys and values), N = tokens of one forward. G and D may differ between layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor

_FIRST_SLOTS = 8
_FIRST_CAPACITY = 128


class KVCache:
    """Keys and values of every layer, one ``[2, S, G, C, D]`` tensor per layer.

    Starts small and doubles, up to ``max_slots * max_len`` tokens, so a large ``max_model_len``
    costs memory only when a request is that long. New memory is zeroed, because attention reads
    masked positions too and multiplies their values by 0: they must be finite.
    """

    def __init__(
        self,
        shapes: Mapping[int, tuple[int, int]] = MappingProxyType({}),
        *,
        max_slots: int,
        max_len: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
        routes: tuple[int, int] | None = None,
    ) -> None:
        """``shapes``: (G, D) by layer. A missing layer is added at its first write. ``routes``:
        layers and experts per token of the routes that are kept beside the keys."""
        self.dtype = dtype
        self.device = device
        self.max_slots = max_slots
        self.max_len = max_len
        self.slots = min(_FIRST_SLOTS, max_slots)
        self.capacity = min(_FIRST_CAPACITY, max_len)
        self.layers = {layer: self._empty(*shape) for layer, shape in shapes.items()}
        self.route_shape = routes
        self.routes: Tensor | None = None if routes is None else self._empty_routes()
        """[1, S, 1, C, L * k] int16: laid out as a layer, so that they are moved with the keys."""

    def _empty(self, num_heads: int, head_dim: int) -> Tensor:
        shape = (2, self.slots, num_heads, self.capacity, head_dim)
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def _empty_routes(self) -> Tensor:
        assert self.route_shape is not None
        layers, k = self.route_shape
        shape = (1, self.slots, 1, self.capacity, layers * k)
        return torch.zeros(shape, dtype=torch.int16, device=self.device)

    @property
    def tensors(self) -> list[Tensor]:
        """All that is kept of tokens, [.., S, .., C, ..] each."""
        return [*self.layers.values(), *([] if self.routes is None else [self.routes])]

    @property
    def shapes(self) -> dict[int, tuple[int, int]]:
        """(G, D) of every layer so far."""
        return {layer: (kept.shape[2], kept.shape[4]) for layer, kept in self.layers.items()}

    @property
    def max_bytes(self) -> int:
        """Memory at ``max_slots`` and ``max_len``."""
        now = sum(layer.numel() * layer.element_size() for layer in self.tensors)
        return now * self.max_slots * self.max_len // (self.slots * self.capacity)

    def reserve(self, slots: int, length: int) -> None:
        """Make room for ``slots`` rows of ``length``; no row after them is in use. Layer by layer,
        so that only one layer exists twice."""
        slots, length = self._grown(slots, length)
        old_length = self.capacity
        kept = min(slots, self.slots)
        if (slots, length) == (self.slots, old_length):
            return
        self.slots = slots
        self.capacity = length
        for layer, shape in self.shapes.items():
            new = self._empty(*shape)
            new[:, :kept, :, :old_length] = self.layers[layer][:, :kept]
            self.layers[layer] = new
        if self.routes is not None:
            wider = self._empty_routes()
            wider[:, :kept, :, :old_length] = self.routes[:, :kept]
            self.routes = wider

    def _grown(self, slots: int, length: int) -> tuple[int, int]:
        assert slots <= self.max_slots and length <= self.max_len, "the scheduler admits no more"
        new_slots = self.slots
        new_length = self.capacity
        while new_length < length:
            new_length = min(2 * new_length, self.max_len)
            new_slots = min(_FIRST_SLOTS, self.max_slots)  # many short rows give way to a long one

        while new_slots < slots:
            new_slots = min(2 * new_slots, self.max_slots)
        return new_slots, new_length

    def write(
        self, layer: int, rows: Tensor, positions: Tensor, keys: Tensor, values: Tensor
    ) -> None:
        """Store N tokens. Rows, positions: [N]; keys, values: ``[N, G, D or less]``."""
        sizes = keys.shape[-1], values.shape[-1]
        if layer not in self.layers:
            self.layers[layer] = self._empty(keys.shape[1], max(sizes))
        for kept, new, size in zip(self.layers[layer], (keys, values), sizes, strict=True):
            width = kept.shape[-1]
            padded = new if size == width else F.pad(new, (0, width - size))
            # One kernel, where an index of each head would need a copy of the heads besides.
            kept.transpose(1, 2).index_put_((rows, positions), padded)

    def copy_row(self, source: int, target: int, length: int) -> None:
        """Copy the first ``length`` tokens of row ``source`` to row ``target``."""
        for layer in self.tensors:
            layer[:, target, :, :length] = layer[:, source, :, :length]

    def write_routes(self, rows: Tensor, positions: Tensor, routes: Tensor) -> None:
        """Store the routes [N, L, k] of N tokens. Rows, positions: [N]."""
        assert self.routes is not None
        self.routes[0, rows, 0, positions] = routes.flatten(1).to(torch.int16)

    def read_routes(self, row: int, length: int) -> Tensor:
        """[length, L, k] of the first tokens of a row, on the host. A copy."""
        assert self.routes is not None and self.route_shape is not None
        return self.routes[0, row, 0, :length].cpu().clone().view(length, *self.route_shape)

    def clear_row(self, row: int) -> None:
        """Zero a row that has non-finite values: masking does not remove them (0 * nan is nan)."""
        for layer in self.tensors:
            layer[:, row] = 0
