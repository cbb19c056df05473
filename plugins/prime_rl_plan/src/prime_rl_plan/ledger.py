"""What every operation of a step allocates and costs, on tensors without values.

Memory is the sum of live storages, by kind, at the peak of each region of a step::

    forward   until the LM head
    top       LM head, loss, and backward through the last block
    middle    backward through the other blocks
    bottom    backward through the first block and the embeddings
    update    clipping and the optimizer

Within a region the peak is linear in the number of layers: its place is always the first or the
last block of the region, whichever holds more. Over the whole step it is not, because another
region may take over.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from prime_rl_plan.devices import ON_HOST

aten = torch.ops.aten
HEAD = ("prime_rl.trainer.logprobs", "prime_rl_kernels.fused_head")
"""Modules that compute logits, forward and backward."""
RESIZE = torch.UntypedStorage.resize_
OUTSIDE = "between steps"
BLOCK_BYTES = 512
"""torch's CUDA allocator rounds sizes up to a multiple of it."""


SMALL = 0.002
"""A peak that rises by a smaller share keeps its kinds: what is new counts as activations."""


class Ledger(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Of one process. ``pairs``: the row's query-key pairs in each layer's attention."""

    def __init__(self, pairs: float, rounds: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.pairs = pairs
        self.rounds = rounds
        self.region = OUTSIDE
        self.charges = False
        """Operations cost something now."""
        self.live: dict[int, tuple[int, str]] = {}
        """Bytes and kind by storage."""
        self.total = 0
        self.owned: Any = lambda: iter(())
        """The storages whose kind is known by what holds them."""
        self.clear()

    def clear(self) -> None:
        """Forget peaks and costs, but not what is allocated."""
        self.peaks: dict[str, dict[str, int]] = {}
        self.costs: Counter[tuple[str, str, str, float, float]] = Counter()
        """Number of operations by region, name, dtype, floating-point operations and bytes."""

    # -- memory

    def hold(self, tensors: Iterable[Tensor], kind: str) -> None:
        """Count tensors that exist already."""
        for tensor in tensors:
            self._allocate(tensor, kind)

    def _allocate(self, tensor: Tensor, kind: str) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        size = storage.nbytes()
        if key in self.live or not size:
            return
        if self.rounds:
            size = math.ceil(size / BLOCK_BYTES) * BLOCK_BYTES
        self.live[key] = (size, kind)
        self.total += size
        weakref.finalize(storage, self._free, key)
        self._look()

    def _free(self, key: int) -> None:
        self.total -= self.live.pop(key, (0, ""))[0]

    def resize(self, storage: torch.UntypedStorage, size: int) -> None:
        """``storage.resize_``: FSDP frees and takes gathered weights by it."""
        RESIZE(storage, size)
        if storage._cdata in self.live:
            before, kind = self.live[storage._cdata]
            self.live[storage._cdata] = (size, kind)
            self.total += size - before
            self._look()

    def _look(self) -> None:
        """Keep the parts of a new peak."""
        peak = self.peaks.setdefault(self.region, {"total": 0})
        if self.total <= peak["total"]:
            return
        more = self.total - peak["total"]
        if more < SMALL * sum(peak.values()):  # to find the kinds takes time
            peak["total"] = self.total
            peak["activations"] = peak.get("activations", 0) + more
            return

        kinds = dict(self.owned())
        parts: Counter[str] = Counter(total=self.total)
        for key, (size, kind) in self.live.items():
            parts[kinds.get(key, kind)] += size
        self.peaks[self.region] = dict(parts)

    # -- operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # its shards come here
        name = func.overloadpacket.__name__
        first = args[0] if args else None
        if isinstance(first, FakeTensor):
            if func is torch.ops.prim.device.default:  # half of all calls
                return first.fake_device
            if func is aten._local_scalar_dense.default:
                of = first.dtype
                return True if of == torch.bool else 1.0 if of.is_floating_point else 1
            chosen = _depends_on_values(func, args)
            if chosen is not None:
                return chosen

        result = func(*args, **(kwargs or {}))
        if not _is_fake(result):
            return result
        made = [each for each in tree_leaves(result) if isinstance(each, Tensor)]
        read = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        known = {each.untyped_storage()._cdata for each in read}
        fresh = [each for each in made if each.untyped_storage()._cdata not in known]
        if fresh:
            kind = self._kind(func, read)
            for each in fresh:
                self._allocate(each, kind)

        if self.charges and not func.is_view:
            self._charge(func, name, read, made)
        return result

    def _kind(self, func: Any, read: list[Tensor]) -> str:
        if func is aten._to_copy.default:
            source = self.live.get(read[0].untyped_storage()._cdata, (0, ""))[1]
            if source in ("weights", "gathered"):
                return "rounded"

        frame = sys._getframe(2)
        while frame is not None:
            if frame.f_globals.get("__name__") in HEAD:
                return "logits"
            frame = frame.f_back  # type: ignore[assignment]

        return "activations"

    def _charge(self, func: Any, name: str, read: list[Tensor], made: list[Tensor]) -> None:
        moved = float(sum(_bytes(each) for each in (*read, *made)))
        dtype = str((read or made)[0].dtype).removeprefix("torch.") if read or made else ""
        if func.namespace == "c10d":
            dtype = "network"
            twice = 1 + (name == "allreduce_")
            moved = float(twice * max((_bytes(each) for each in read), default=0))
        self.costs[self.region, name, dtype, self._flops(func, name, read, made), moved] += 1

    def _flops(self, func: Any, name: str, read: list[Tensor], made: list[Tensor]) -> float:
        if "varlen_attn" in name:  # causal: two products forward, five backward
            query = read[1 if "backward" in name else 0]
            products = 5 if "backward" in name else 2
            return products * 2.0 * self.pairs * query.shape[-2] * query.shape[-1]

        if name == "_grouped_mm":  # each row of the left factor meets one expert
            left = read[0]
            right = read[1]
            return 2.0 * left.shape[-2] * left.shape[-1] * right.shape[-1]

        count = flop_registry.get(func.overloadpacket)
        try:
            return float(count(*read, out_val=made[0])) if count and name in PRODUCTS else 0.0
        except (TypeError, ValueError):
            return 0.0


PRODUCTS = {"mm", "bmm", "addmm", "baddbmm"}


def _is_fake(result: Any) -> bool:
    made = [each for each in tree_leaves(result) if isinstance(each, Tensor)]
    return all(isinstance(each, FakeTensor) for each in made)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _depends_on_values(func: Any, args: Any) -> Tensor | None:
    """For an operation whose result's size lies in the tensor: as if every element was chosen."""
    first: Tensor = args[0]
    if func is aten.nonzero.default:
        return torch.zeros(first.numel(), first.dim(), dtype=torch.int64)
    if func is aten.masked_select.default:
        return first.new_empty(first.numel())
    if func is aten.index.Tensor:
        masks = [each for each in args[1] if each is not None and each.dtype == torch.bool]
        if masks:
            rows = masks[0].numel()
            return first.new_empty((rows, *first.shape[masks[0].dim() :]))

    return None


def owners(policy: nn.Module, optimizers: Iterable[Any]) -> Iterator[tuple[int, str]]:
    """The storages of weights, gradients, optimizer state and gathered weights, with their kind."""
    for parameter in policy.parameters():
        yield _key(parameter), "weights"
        if parameter.grad is not None:
            yield _key(parameter.grad), "gradients"

    for buffer in policy.buffers():
        yield _key(buffer), "weights"
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            kind = ON_HOST if group.get("on_host") else "optimizer"
            for parameter in group["params"]:
                state = optimizer.state.get(parameter, {}).values()
                yield from ((_key(each), kind) for each in state if torch.is_tensor(each))

    for module in policy.modules():
        for each in _sharded(module):
            gathered = [*each.all_gather_outputs]
            whole = getattr(each, "_unsharded_param", None)
            if whole is not None:
                gathered.append(whole)
                if whole.grad is not None:
                    yield _key(whole.grad), "gradients"
            if each.unsharded_accumulated_grad is not None:
                yield _key(each.unsharded_accumulated_grad), "gradients"
            yield from ((_key(tensor), "gathered") for tensor in gathered)
            shard = each.sharded_param  # while it is gathered, no parameter of the policy
            yield _key(shard), "weights"
            if shard.grad is not None:
                yield _key(shard.grad), "gradients"


def _sharded(module: nn.Module) -> Iterator[Any]:
    """The parameters that FSDP has sharded in a module."""
    state = getattr(module, "_get_fsdp_state", None)
    if state is not None:
        found = state()._fsdp_param_group
        yield from found.fsdp_params if found is not None else ()


def _key(tensor: Tensor) -> int:
    local: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return int(local.untyped_storage()._cdata)
