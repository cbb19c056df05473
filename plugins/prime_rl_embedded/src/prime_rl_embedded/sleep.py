"""Giving an accelerator's memory away and taking it back, under tensors that stay what they are.

    sleep   storage -> host buffer; storage of no bytes
    wake    storage of its old size <- host buffer

Only storages are emptied, so every view into them (parameters into fused projections, tied names)
is whole again after waking. Nobody may compute with them in between.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, UntypedStorage


@dataclass
class _Moved:
    storage: UntypedStorage
    size: int
    """Bytes."""
    host: Tensor | None
    """None: nothing in it was wanted; it comes back as zeros."""


@dataclass
class Offloaded:
    """Tensors whose storages are on the host for now."""

    _moved: list[_Moved] = field(default_factory=list)

    def take(self, tensors: Iterable[Tensor], *, keep: bool = True) -> None:
        """Empty the storages of these tensors; with ``keep``, after copying them to the host."""
        taken = {moved.storage.data_ptr() for moved in self._moved}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.nbytes() and storage.data_ptr() not in taken:
                self._moved.append(_emptied(storage, keep))

    def give_back(self) -> None:
        """Every storage is again as it was."""
        for moved in self._moved:
            moved.storage.resize_(moved.size)
            if moved.host is None:
                _bytes_of(moved.storage).zero_()
            else:
                _bytes_of(moved.storage).copy_(moved.host)
        self._moved.clear()


def _emptied(storage: UntypedStorage, keep: bool) -> _Moved:
    size = storage.nbytes()
    host = torch.empty(size, dtype=torch.uint8).copy_(_bytes_of(storage)) if keep else None
    storage.resize_(0)
    return _Moved(storage, size, host)


def _bytes_of(storage: UntypedStorage) -> Tensor:
    """A view, [bytes]."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def release_cached(device: torch.device) -> None:
    """Let other processes have what the allocator holds in reserve."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
