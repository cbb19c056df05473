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

import itertools
import math
import sys
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from prime_rl_plan.devices import INPUTS_ON_HOST, ON_HOST, SENT, SHARED

aten = torch.ops.aten
HEAD = ("prime_rl.trainer.logprobs", "prime_rl_kernels.fused_head")
"""Modules that compute logits, forward and backward."""
UNCOMPILED = (*HEAD, "prime_rl_kernels.attention", "prime_rl.trainer.loss")
"""Modules that run outside of the compiled blocks."""
LAYOUTS = ("torch.distributed.tensor._sharding_prop",)
"""Where DTensor asks for the shape of a result, by a call on tensors without values."""
OFFLOAD = "prime_rl_kernels.offload"
"""The module that keeps inputs of blocks on the host: its copies cross the bus."""
NETWORK = "network"
"""The dtype of what travels begins so: ``network/KIND/SIZE/SPAN``. KIND is ``SHARED`` or ``SENT``,
SIZE the number of ranks of the group, and SPAN counts them from its first to its last."""
EXPERT_RANKS = "prime_rl.trainer.expert_ranks"
"""The module that gathers experts of other groups of ranks."""
EXCHANGES = ("prime_rl.trainer.context", EXPERT_RANKS)
"""The modules whose collectives a rank waits for."""
RESIZE = torch.UntypedStorage.resize_
OUTSIDE = "between steps"
BLOCK_BYTES = 512
"""torch's CUDA allocator rounds sizes up to a multiple of it."""


SMALL = 0.002
"""A peak that rises by a smaller share keeps its kinds: what is new counts as activations."""


class Ledger(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The ledger of one process. ``pairs``: the row's query-key pairs in each layer's attention."""

    def __init__(self, pairs: float, rounds: bool, fuses: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.pairs = pairs
        self.rounds = rounds
        self.fusion = Fusion() if fuses else None
        """What a compiler of the blocks leaves of their element-wise work."""
        self.region = OUTSIDE
        self.charges = False
        """Operations cost something now."""
        self.charges_gathering = False
        """Gathered weights do, and they are for all rows of the step: a cost of the update."""
        self.live: dict[int, tuple[int, str]] = {}
        """Bytes and kind by storage."""
        self.total = 0
        self.on_host = 0
        """Bytes that ``OFFLOAD`` keeps on the host, which are not in ``total``."""
        self.owned: Any = lambda: iter(())
        """Storages whose kind follows from their owner: parameters, gradients, optimizer state."""
        self.clear()

    def clear(self) -> None:
        """Forget peaks and costs, but not what is allocated."""
        self.peaks: dict[str, dict[str, int]] = {}
        self.most_on_host = 0
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
        weakref.finalize(storage, self._free, key)
        if kind == INPUTS_ON_HOST:
            self.on_host += size
            self.most_on_host = max(self.most_on_host, self.on_host)
        else:
            self.total += size
            self._look()

    def _free(self, key: int) -> None:
        size, kind = self.live.pop(key, (0, ""))
        if kind == INPUTS_ON_HOST:
            self.on_host -= size
        else:
            self.total -= size

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
            if kind != INPUTS_ON_HOST:
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
        if fresh and _in_modules(LAYOUTS):  # their tensors are fake on a GPU too
            return result
        if fresh:
            kind = self._kind(func, read)
            for each in fresh:
                self._allocate(each, kind)

        charged_in = self.region if self.charges else None
        if charged_in is None and self._gathers_for_step(name):
            charged_in = "update"
        if charged_in is not None and _moves_bytes(func, bool(fresh)):
            touched = _touched(func, args, kwargs or {}, fresh)
            self._charge(charged_in, func, name, args, touched=touched)
        return result

    def _gathers_for_step(self, name: str) -> bool:
        """Whether an operation gathers weights that stay for all rows. Experts of other groups are
        gathered for each row, and so are the parts of one: the last row has their costs."""
        is_gathering = self.charges_gathering and name == "_allgather_base_"
        return is_gathering and not _in_modules(EXCHANGES)

    def _kind(self, func: Any, read: list[Tensor]) -> str:
        if func is aten._to_copy.default:
            source = self.live.get(read[0].untyped_storage()._cdata, (0, ""))[1]
            if source in ("weights", "gathered"):
                return "rounded"
        if _is_called_by(("to_host",), OFFLOAD):
            return INPUTS_ON_HOST
        if func is aten.new_empty.default and _is_called_by(("__init__",), EXPERT_RANKS):
            return "gathered"
        return "logits" if _in_modules(HEAD) else "activations"

    def _charge(self, region: str, func: Any, name: str, args: Any, touched: Touched) -> None:
        read = touched.read
        moved = float(sum(_bytes(each) for each in touched))
        if self.fusion is not None and region != "update":
            fusible = _is_element_wise(func, name) and not _in_modules(UNCOMPILED)
            moved = self.fusion.moved(touched, fusible=fusible)
        first = next(iter(touched), None)
        dtype = "" if first is None else str(first.dtype).removeprefix("torch.")
        if func.namespace == "c10d":
            waits = name.startswith("alltoall") or _in_modules(EXCHANGES)
            dtype = f"{NETWORK}/{SENT if waits else SHARED}/{_group_of(args)}"
            twice = 1 + (name == "allreduce_")
            moved = float(twice * max((_bytes(each) for each in read), default=0))
        elif name == "copy_" and _is_called_by(("to_host", "to_device"), OFFLOAD):
            dtype = "host"
            moved = float(_bytes(touched.written[0]))
        flops = self._flops(func, name, read=read, made=touched.results)
        self.costs[region, name, dtype, flops, moved] += 1

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


@dataclass(frozen=True)
class Touched:
    """The tensors whose numbers an operation moves."""

    read: list[Tensor]
    written: list[Tensor]
    """In place."""
    fresh: list[Tensor]
    """Results with memory of their own."""

    def __iter__(self) -> Iterator[Tensor]:
        """A tensor that is read and written comes twice."""
        return itertools.chain(self.read, self.written, self.fresh)

    @property
    def results(self) -> list[Tensor]:
        return [*self.fresh, *self.written]


def _touched(func: Any, args: Any, kwargs: Any, fresh: list[Tensor]) -> Touched:
    """By the schema, which says what is written. Operations on lists return nothing."""
    read: list[Tensor] = []
    written: list[Tensor] = []
    arguments = func._schema.arguments
    given = dict(zip((each.name for each in arguments), args, strict=False)) | kwargs
    for argument in arguments:
        tensors = [e for e in tree_leaves(given.get(argument.name)) if isinstance(e, Tensor)]
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        if argument.name == "grads":  # a fused optimizer would write them only to unscale them
            is_written = False
        if is_written:
            written += tensors
        if not (is_written and (argument.kwarg_only or func.overloadpacket in OVERWRITING)):
            read += tensors
    return Touched(read, written, fresh)


OVERWRITING = {aten.copy_, aten.fill_, aten.zero_, aten._foreach_copy_, aten._foreach_zero_}
"""Operations that write their first argument without reading it, as those with ``out`` do."""


def _moves_bytes(func: Any, is_fresh: bool) -> bool:
    """Whether an operation reads or writes numbers. ``is_fresh``: its result has memory of its
    own. Memory that is only taken is not written. A view moves nothing, those without the name of
    one (``_unsafe_view``) included, nor does one in place (``squeeze_``)."""
    if func.overloadpacket in ALLOCATIONS or torch.Tag.inplace_view in func.tags:
        return False
    return is_fresh or func._schema.is_mutable or func.namespace == "c10d"


ALLOCATIONS = {
    *(aten.empty, aten.empty_like, aten.empty_strided),
    *(aten.new_empty, aten.new_empty_strided),
}


def _group_of(args: Any) -> str:
    """``SIZE/SPAN`` of the ranks that a collective is among."""
    (boxed,) = (each for each in args if isinstance(each, torch.ScriptObject) and _is_group(each))
    ranks = dist.get_process_group_ranks(dist.ProcessGroup.unbox(boxed))
    return f"{len(ranks)}/{max(ranks) - min(ranks) + 1}"


def _is_group(boxed: torch.ScriptObject) -> bool:
    return boxed._type().qualified_name().endswith(".ProcessGroup")


PRODUCTS = {"mm", "bmm", "addmm", "baddbmm"}


class Fusion:
    """Bytes that operations move where a compiler makes one kernel of each run of element-wise ones
    and reductions: between two others, in the order of the program.

    A run reads what others made, each tensor once. It writes a result of its own only if another
    kernel reads it. Then the bytes of the write are charged to that reader. Where a compiler would
    compute such a result again instead, it moves less.
    """

    def __init__(self) -> None:
        self._inside: dict[int, int] = {}
        """Results that no kernel has written yet: their run, by storage."""
        self._run = 0
        self._read: set[int] = set()
        """Storages that the present run has read."""

    def moved(self, touched: Touched, fusible: bool) -> float:
        """Bytes of one operation."""
        if not fusible:
            self._run += 1
            self._read.clear()

        total = 0.0
        for tensor in touched.read:
            key = tensor.untyped_storage()._cdata
            run = self._inside.get(key)
            if fusible and (run == self._run or key in self._read):
                continue
            if run is not None:  # its run has to write it
                total += _bytes(tensor)
                del self._inside[key]
            total += _bytes(tensor)
            if fusible:
                self._read.add(key)

        for tensor in touched.written:
            key = tensor.untyped_storage()._cdata
            if fusible and key in self._inside:
                self._inside[key] = self._run
            else:
                total += _bytes(tensor)

        for tensor in touched.fresh:
            if not fusible:
                total += _bytes(tensor)
                continue
            storage = tensor.untyped_storage()
            weakref.finalize(storage, self._inside.pop, storage._cdata, None)
            self._inside[storage._cdata] = self._run

        return total


def _is_element_wise(func: Any, name: str) -> bool:
    """Whether a compiler fuses the operation with its neighbors."""
    tags = torch.Tag.pointwise in func.tags or torch.Tag.reduction in func.tags
    return tags or name in FUSED


FUSED = {
    *("_to_copy", "clone", "copy_", "cat", "sum", "mean", "expand", "slice_backward"),
    *("select_backward", "new_zeros", "zeros_like", "ones_like", "fill_", "zero_"),
}
"""Operations without a tag that the compiler fuses too."""


def _in_modules(names: Sequence[str]) -> bool:
    """Whether one of these modules is calling."""
    return any(frame.f_globals.get("__name__") in names for frame in _callers())


def _is_called_by(functions: Sequence[str], module: str) -> bool:
    """Whether one of these functions of a module is calling."""
    return any(
        frame.f_code.co_name in functions and frame.f_globals.get("__name__") == module
        for frame in _callers()
    )


def _callers() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        yield frame
        frame = frame.f_back


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
        group = state()._fsdp_param_group
        yield from group.fsdp_params if group is not None else ()


def _key(tensor: Tensor) -> int:
    local: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return int(local.untyped_storage()._cdata)
