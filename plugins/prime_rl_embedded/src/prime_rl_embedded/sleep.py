"""Free an accelerator's memory and restore it, without replacing any tensor.

    sleep   storage -> host buffer; storage resized to 0 bytes
    wake    storage resized back <- host buffer

The storages are emptied, not the tensors. So all views into them (parameters into fused
projections, tied names) are valid again after waking. Computing with them in between is an error.
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
    """None: the contents were dropped. The storage comes back as zeros."""


@dataclass
class Offloaded:
    """Storages that are on the host."""

    _moved: list[_Moved] = field(default_factory=list)
    _spare: dict[int, list[Tensor]] = field(default_factory=dict)
    """Host buffers by their size in bytes, kept for the next sleep. Pinned for a GPU: a copy into
    fresh ordinary memory takes several times as long."""

    def offload(self, tensors: Iterable[Tensor], *, keep: bool = True) -> None:
        """Empty the storages of these tensors; with ``keep``, after copying them to the host."""
        taken = {moved.storage.data_ptr() for moved in self._moved}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.nbytes() and storage.data_ptr() not in taken:
                self._moved.append(self._emptied(storage, keep))

    def restore(self) -> None:
        """Restore every storage."""
        self._spare = {}  # what this sleep did not use is of an earlier size of the KV
        for moved in self._moved:
            moved.storage.resize_(moved.size)
            if moved.host is None:
                _bytes_of(moved.storage).zero_()
            else:
                _bytes_of(moved.storage).copy_(moved.host)
                self._spare.setdefault(moved.size, []).append(moved.host)

        self._moved.clear()

    def _emptied(self, storage: UntypedStorage, keep: bool) -> _Moved:
        size = storage.nbytes()
        host = None
        if keep:
            spare = self._spare.get(size)
            on_gpu = storage.device.type == "cuda"
            host = spare.pop() if spare else torch.empty(size, dtype=torch.uint8, pin_memory=on_gpu)
            host.copy_(_bytes_of(storage))

        storage.resize_(0)
        return _Moved(storage, size, host)


def _bytes_of(storage: UntypedStorage) -> Tensor:
    """A uint8 view [bytes]."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def release_cached(device: torch.device) -> None:
    """Return the memory that torch's allocator caches to the device."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
