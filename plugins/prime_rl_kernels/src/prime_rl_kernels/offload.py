"""Inputs of recomputed blocks in host memory, from the block's forward pass to its backward pass.

Recomputation keeps one hidden state per block: T x D x 2 bytes. For rows of 32k tokens and more
that is most of what a small model keeps. The copy to the host runs beside the block's own forward
pass, and each block's backward pass starts the copy back for the block before it. So two states
are on the GPU at once, and no product waits if a block takes longer than its copy.

Shapes: T = tokens of the row, D = hidden size.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, noop_context_fn

Context: TypeAlias = AbstractContextManager[Any]
Contexts: TypeAlias = Callable[[], tuple[Context, Context]]


@dataclass
class Chain:
    """The blocks of one model in the order of their forward passes."""

    last: Callable[[], HostCopy | None] = lambda: None
    """A weak reference: a row whose backward pass is over is gone."""


def checkpoint_offloaded(
    chain: Chain,
    forward: Callable[..., Any],
    hidden: Tensor,
    *others: Any,
    context_fn: Contexts = noop_context_fn,
    **options: Any,
) -> Any:
    """``forward(hidden, *others)``, recomputed in the backward pass from a copy of ``hidden`` on
    the host. ``context_fn`` and ``options``: of ``checkpoint``, and keyword arguments of
    ``forward``."""
    state = Recomputed(hidden, chain)
    contexts = partial(state.contexts, context_fn)
    return checkpoint(partial(state.compute, forward), *others, context_fn=contexts, **options)


class Recomputed:
    """The hidden state [1, T, D] of one block and row: the tensor itself for the first pass, its
    copy for the second."""

    def __init__(self, hidden: Tensor, chain: Chain) -> None:
        self.hidden: Tensor | None = hidden
        self.copy = HostCopy.of(hidden, before=chain.last)
        chain.last = weakref.ref(self.copy)

    def compute(self, forward: Callable[..., Any], *others: Any, **named: Any) -> Any:
        """One pass through the block."""
        hidden = self.hidden
        self.hidden = None
        return forward(hidden, *others, **named)

    def contexts(self, context_fn: Contexts) -> tuple[Context, Context]:
        """Those of the first and of the second pass."""
        first, second = context_fn()
        return first, self._refetched(second)

    @contextmanager
    def _refetched(self, second: Context) -> Iterator[None]:
        # Before the context begins, which may know only the operations of the first pass.
        self.hidden = self.copy.fetch()
        with second:
            yield


@dataclass(eq=False)
class HostCopy:
    """A tensor in host memory, and where it came from."""

    values: Tensor
    device: torch.device
    requires_grad: bool
    before: Callable[[], HostCopy | None]
    """The copy of the block before, whose backward pass is next."""
    ready: Any = None
    """The event after which ``values`` are there; None without streams."""
    fetched: tuple[Tensor, Any] | None = None
    """On the device again, and the event after which it is there."""

    @classmethod
    def of(cls, tensor: Tensor, before: Callable[[], HostCopy | None]) -> HostCopy:
        """Starts the copy."""
        source = tensor.detach()
        stream = copy_stream(source.device)
        if stream is None:
            return cls(to_host(source), tensor.device, tensor.requires_grad, before)

        stream.wait_stream(torch.cuda.current_stream(source.device))
        with torch.cuda.stream(stream):
            values = to_host(source)
            ready = stream.record_event()
        source.record_stream(stream)  # its memory is not used again before the copy is done
        return cls(values, tensor.device, tensor.requires_grad, before, ready)

    def start(self) -> None:
        """Begin to bring it back."""
        if self.fetched is not None:
            return
        stream = copy_stream(self.device)
        if stream is None:
            self.fetched = (to_device(self.values, self.device), None)
            return
        with torch.cuda.stream(stream):
            stream.wait_event(self.ready)
            self.fetched = (to_device(self.values, self.device), stream.record_event())

    def fetch(self) -> Tensor:
        """It on the device; begins to bring back the one before."""
        self.start()
        assert self.fetched is not None
        tensor, arrived = self.fetched
        self.fetched = None
        if arrived is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(arrived)
            tensor.record_stream(current)
        earlier = self.before()
        if earlier is not None:
            earlier.start()
        return tensor.requires_grad_(self.requires_grad)


def to_host(tensor: Tensor) -> Tensor:
    """A copy in host memory, pinned if it comes from a GPU: otherwise the copy would block."""
    pins = tensor.device.type == "cuda"
    values = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pins)
    return values.copy_(tensor, non_blocking=True)


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """A copy on the device."""
    return torch.empty_like(values, device=device).copy_(values, non_blocking=True)


@cache
def copy_stream(device: torch.device) -> Any:
    """The stream of all copies of a GPU; None on a CPU."""
    if device.type != "cuda":
        return None
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
