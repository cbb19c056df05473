"""Many trainer ranks: their process group, what they exchange, and the policy in shards.

    mesh [replicas, shards]    rank = replica * shards + shard

A rank holds one shard of every weight, gradient and optimizer moment. Before a block runs, forward
or backward, the ranks of a replica gather its weights; after its backward each keeps its shard of
the gradient's sum over all ranks (FSDP2; Zhao et al. 2023, arXiv:2304.11277; replicas: their
hybrid sharding). Deviations:

1. Gradients are summed, not averaged: our loss is a sum over global counts already.
2. In bfloat16 a single rank has shards too, all of them: its weights are in float32, and a block's
   are rounded while it runs. So the curve does not depend on the number of ranks.

The experts of a mixture may be left out of this (``trainer.expert_parallel``): each rank of a
replica has equally many, in the same shards, and tokens travel to them (``token_exchange.py``). So
a checkpoint or a published version does not tell in which of the two ways it was trained.

A collective needs every rank, in the same order on all of them. So an error of one rank is
exchanged before it is raised (``on_main``, ``on_all``): ranks that go on without it would wait
for it forever. One rank exchanges nothing.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from prime_rl.errors import ConfigError, WeightsError
from prime_rl.rundir.launch import STORE
from prime_rl.trainer.rank import Rank

TIMEOUT = timedelta(hours=2)
"""How long ranks wait for one that reads or writes a large model on a slow disk, at least. It is
not needed when a rank dies: the agent then ends the others."""
_limit = TIMEOUT
"""The timeout of this process's groups."""


@contextmanager
def joined(
    rank: Rank, device: torch.device, elsewhere: bool = False, hang_timeout: float = 0.0
) -> Iterator[None]:
    """In one process group with the other ranks: NCCL for tensors on a GPU, gloo for the host's.
    ``elsewhere``: engines run on other machines, and NCCL may have to reach them. Ranks wait for
    each other for ``TIMEOUT``, or twice the ``hang_timeout`` (seconds) if that is longer.

    After an error the group is not destroyed: that would wait for ranks that wait for us. The
    process ends instead (``__main__.leave``).
    """
    global _limit
    _limit = max(TIMEOUT, 2 * timedelta(seconds=hang_timeout))
    if rank.size > 1:
        _join(rank, device, _local_store(rank, elsewhere) if STORE in os.environ else None)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def _join(rank: Rank, device: torch.device, store: Any) -> None:
    if device.type == "cuda":
        torch.cuda.init()  # type: ignore[no-untyped-call]
        torch.cuda.set_device(device.index or 0)

    # -1: torch takes rank and size from the environment, as torchrun sets it.
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=rank.number if store else -1,
        world_size=rank.size if store else -1,
        timeout=_limit,
    )


def _local_store(rank: Rank, elsewhere: bool = False) -> Any:
    """A store in a file: all ranks are on this machine, and listen on loopback only. NCCL keeps its
    first interface for the life of a process, so it must not be loopback if engines are
    elsewhere."""
    if sys.platform == "linux":
        for library in ("GLOO",) if elsewhere else ("GLOO", "NCCL"):
            os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo")
    store = dist.FileStore(os.environ[STORE], rank.size)  # type: ignore[attr-defined]
    store.set_timeout(_limit)  # else 300 s, too short for a rank that reads from a slow disk
    return store


def several_ranks() -> bool:
    """Whether other processes train this model too."""
    return num_ranks() > 1


def limit() -> timedelta:
    """How long ranks wait for each other, in every group."""
    return _limit


def rank() -> int:
    """Rank 0 publishes, measures and logs for all."""
    return dist.get_rank() if dist.is_initialized() else 0


def num_ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


RankGroup = dist.ProcessGroup | None
"""None: the group of the main thread. Another thread has its own group, because collectives of two
threads must not mix."""


def host_group() -> RankGroup:
    """A group for another thread; every rank calls this at the same point."""
    return (
        cast(RankGroup, dist.new_group(backend="gloo", timeout=_limit)) if several_ranks() else None
    )


def gather(value: Any, group: RankGroup = None) -> list[Any]:
    """Every rank's value on all of them, in order of rank. Travels as JSON."""
    if not several_ranks():
        return [value]
    # Not a pickle, which runs code when it is read.
    data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)

    # Two collectives: all ranks have to agree on a size before they exchange bytes.
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(num_ranks())]
    dist.all_gather(sizes, torch.tensor([len(data)]), group=group)
    lengths = [int(size) for size in sizes]
    # `all_gather` takes tensors of one size.
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    padded[: len(data)] = data
    columns = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(columns, padded, group=group)

    pairs = zip(columns, lengths, strict=True)
    return [json.loads(column[:length].numpy().tobytes()) for column, length in pairs]


def on_main(action: Callable[[], object], group: RankGroup = None) -> None:
    """Rank 0 acts and the others wait; all raise if it fails: ``WeightsError`` for an error of the
    disk, so either all ranks try again or none."""
    on_all(action if rank() == 0 else lambda: None, group)


def on_all(action: Callable[[], object], group: RankGroup = None) -> None:
    """Every rank acts, without collectives; all raise if one fails, like ``on_main``."""
    error = None
    try:
        action()
    except Exception as raised:  # the others wait for us, in a thread perhaps
        error = raised
    _agree(error, group)


def stream_to_main(
    tensors: Mapping[str, Tensor],
    use: Callable[[Iterator[Tensor]], object],
    *,
    device: torch.device | None = None,
) -> None:
    """Rank 0 uses the whole tensors, one at a time, on ``device`` (None: the host); all raise if
    that fails.

    Every rank takes part in gathering one. So when ``use`` fails, the rest is still gathered, and
    dropped. If gathering itself fails (no memory), ranks are out of step: that error ends the rank.
    """
    broken: list[Exception] = []

    def gathered() -> Iterator[Tensor]:
        for tensor in tensors.values():
            try:
                whole = _whole(tensor, device or torch.device("cpu"))
            except Exception as raised:
                broken.append(raised)
                raise
            yield whole

    stream = gathered()
    error = None
    if rank() == 0:
        try:
            use(stream)
        except (OSError, WeightsError) as raised:
            if broken:  # even if ``use`` has wrapped it: a second attempt would hang
                raise broken[0] from None
            error = raised

    if several_ranks():
        for _ in stream:
            pass

    _agree(error)


def _whole(tensor: Tensor, device: torch.device) -> Tensor:
    tensor = tensor.detach()
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()  # on every rank: gathering is collective
    return tensor.to(device).contiguous() if rank() == 0 else tensor


def _agree(error: Exception | None, group: RankGroup = None) -> None:
    """Raise on every rank if one has an error: its own, or that of the first other rank. An error
    that a retry cannot fix takes precedence over a disk error."""
    of_disk = isinstance(error, (OSError, WeightsError))
    gathered = gather(None if error is None else [of_disk, str(error)], group)
    errors = [(number, *each) for number, each in enumerate(gathered) if each is not None]
    lasting = [each for each in errors if not each[1]]

    # A rank raises its own error first, unless it could retry and another rank could not.
    if error is not None and not (of_disk and lasting):
        raise error
    for number, may_retry, text in lasting or errors:
        raise (WeightsError if may_retry else RuntimeError)(f"rank {number}: {text}")


def exchange(
    rows: Tensor,
    group: RankGroup,
    sent: Sequence[int] | None = None,
    received: Sequence[int] | None = None,
) -> Tensor:
    """Rows to the ranks of a group, and theirs to this one, with the same way back for gradients.
    Every rank of the group calls this.

    ``sent``, ``received``: how many rows go to each rank and come from it, in order of rank. None:
    equally many.
    """
    apply: Any = _Exchange.apply
    arrived: Tensor = apply(rows, group, sent, received)
    return arrived


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: RankGroup, sent: Any, received: Any) -> Tensor:
        # Gradients take the reverse path: backward sends what forward received.
        ctx.way_back = group, received, sent
        return _exchanged(rows, group, sent=sent, received=received)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        group, sent, received = ctx.way_back
        return _exchanged(grad, group, sent=sent, received=received), None, None, None


def _exchanged(rows: Tensor, group: RankGroup, sent: Any, received: Any) -> Tensor:
    num_rows = len(rows) if received is None else sum(received)
    arrived = rows.new_empty(num_rows, *rows.shape[1:])
    dist.all_to_all_single(
        arrived,
        rows.contiguous(),
        output_split_sizes=received,
        input_split_sizes=sent,
        group=group,
    )
    return arrived


def full(tensor: Tensor) -> Tensor:
    """A sharded 0-dim tensor whole; every rank calls this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


# Torch 2.15 has further names for them, and the old ones warn.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# Torch 2.14 gives the function a public name, and the old one warns.
set_timeout = getattr(dist, "set_timeout", None) or distributed_c10d._set_pg_timeout


def make_mesh(device_type: str, *, replicate: int, **sizes: int) -> DeviceMesh:
    """All ranks by these dimensions, the last one fastest; without ``replicate`` if it is 1."""
    sizes = {"replicate": replicate} | sizes if replicate > 1 else sizes
    mesh = init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    for group in mesh.get_all_groups():  # otherwise ten minutes, with NCCL
        set_timeout(_limit, group)
    return mesh


def shard(
    root: nn.Module,
    blocks: set[str],
    device: torch.device,
    replicas: int,
    home: torch.device | None = None,
    *,
    half: bool = False,
    exact: Sequence[nn.Module] = (),
    tuned: bool = False,
    experts: Sequence[nn.Module] = (),
    reduces_in: torch.dtype = torch.float32,
    keeps_gathered: bool = False,
) -> None:
    """Leave each rank its part of ``root``: one unit per module of a class named in ``blocks``, one
    for the rest. ``home``: where it lies until it is moved to ``device``. Values are copied there
    from the host, or read from files.

    ``half``: all but the modules ``exact`` compute in bfloat16. ``tuned``: what is frozen is not
    published, so it is kept in bfloat16 as well. ``experts``: modules whose weights have equally
    many rows per expert, one expert after the other, and are not gathered with their block.
    ``reduces_in``: ranks sum gradients in this type, those of ``exact`` in float32, without the
    units within. ``keeps_gathered``: a unit's weights stay gathered after its forward pass.

    Raises ``ConfigError`` if nothing is a block.
    """
    units = [module for module in root.modules() if type(module).__name__ in blocks]
    if not units and several_ranks():
        raise ConfigError(
            f"model: no module is one of its blocks ({', '.join(sorted(blocks)) or 'none named'}), "
            "so there is nothing to shard by. Train it with trainer.num_ranks = 1."
        )

    # FSDP needs a process group, of one rank too (deviation 2).
    if not dist.is_initialized():
        _join(Rank(), device, dist.HashStore())  # type: ignore[attr-defined]
    # With a mesh of two dimensions FSDP replicates over the first.
    mesh = make_mesh(device.type, replicate=replicas, shard=num_ranks() // replicas)

    places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}  # several of a tied one
    for module in root.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(parameter, []).append((module, name))

    # On meta while FSDP cuts them, so that no rank needs memory for the whole model.
    for value, where in places.items():
        _set_parameter(where, value.detach().to("meta"), like=value)

    resident = {weight for module in experts for weight in module.parameters()}
    options: dict[str, Any] = {"ignored_params": resident} if resident else {}
    if keeps_gathered:
        options["reshard_after_forward"] = False

    for module in (*units, *exact, root):  # from the inside out: a unit takes what is left over
        dtype = torch.bfloat16 if half and module not in exact else None
        policy = MixedPrecisionPolicy(
            param_dtype=dtype,
            reduce_dtype=torch.float32 if module in exact else reduces_in,
            # Else FSDP would round the row that the policy gets, with temperatures in it. And it
            # would copy the row's layout for each block, so that nothing could be cached there.
            cast_forward_inputs=False,
        )
        sharded = fully_shard(module, mesh=mesh, mp_policy=policy, **options)
        # Sums and not means: the loss has its global counts already (deviation 1).
        if mesh.size() > 1:  # FSDP divides by 1 too, into another tensor
            sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)  # gloo knows no scaled sum

    while places:
        value, where = places.popitem()  # a whole weight is freed once its shard is filled
        (module, name), *_ = where
        dtype = torch.bfloat16 if half and tuned and not value.requires_grad else None
        weight = module.get_parameter(name)
        if weight in resident:
            part = _resident(weight, mesh, home or device, dtype or weight.dtype)
        else:
            part = torch.empty_like(weight, device=home or device, dtype=dtype)
        fill(part, value)
        _set_parameter(where, part, like=value)


def _resident(weight: Tensor, mesh: DeviceMesh, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Memory for this rank's experts of a weight [E, ...], as FSDP would lay them out."""
    num_ranks = mesh.shape[-1]
    shape = (len(weight) // num_ranks, *weight.shape[1:])
    # On meta: a local part on the host would be moved to the GPU, which engines may have now.
    local = torch.empty(shape, dtype=dtype, device="meta")
    placements = [*[Replicate()] * (mesh.ndim - 1), Shard(0)]
    # Checking would be another collective, and all ranks lay out alike.
    part = DTensor.from_local(local, mesh, placements, run_check=False)
    return torch.empty_like(part, device=device)


def sum_over_replicas(gradients: Iterable[Tensor | None], dtype: torch.dtype) -> None:
    """Add up the gradients of experts over the replicas, in place, and in ``dtype``: FSDP does it
    for the others. Every rank calls this, with as many gradients."""
    for gradient in gradients:
        if isinstance(gradient, DTensor) and gradient.device_mesh.ndim > 1:
            local = gradient.to_local()
            rounded = local.to(dtype)  # the same tensor, if it has the type
            dist.all_reduce(rounded, group=gradient.device_mesh.get_group(0))
            local.copy_(rounded)


def _set_parameter(where: list[tuple[nn.Module, str]], value: Tensor, like: nn.Parameter) -> None:
    """``value`` becomes the parameter at every place of a tied one, trained if ``like`` is."""
    parameter = nn.Parameter(value.detach(), like.requires_grad)
    for module, name in where:
        module._parameters[name] = parameter


@torch.no_grad()
def fill(part: Tensor, value: Tensor) -> None:
    """Copy this rank's part of ``value``, which is whole, in files, or in shards like ``part``."""
    local = part.to_local() if isinstance(part, DTensor) else part.detach()
    first = first_row(part)
    read = getattr(value, "read_from_files", None)
    if read:
        read(local.view(-1), first * (value.numel() // max(1, *value.shape[:1])))
    else:
        rows = slice(first, first + len(local))
        local.copy_(value.to_local() if isinstance(value, DTensor) else value[rows])


def first_row(tensor: Tensor) -> int:
    """Rows of the whole before this rank's, which torch.chunk has cut: the last may have fewer."""
    rows = max((1, *tensor.shape[:1]))
    place = 0
    if isinstance(tensor, DTensor):
        mesh = tensor.device_mesh
        cuts = zip(tensor.placements, mesh.shape, mesh.get_coordinate() or (), strict=True)
        # As torch.chunk cuts n parts: ceil(rows / n) each, and the last ones what is left.
        place = sum(min(i * -(-rows // n), rows) for each, n, i in cuts if each.is_shard(0))
    return place


def begin_backward(root: nn.Module, last: bool, keeps_gathered: bool = False) -> None:
    """Before a micro batch's backward pass: replicas sum their gradients after the ``last``.
    ``keeps_gathered``: weights stay gathered until then."""
    if isinstance(root, FSDPModule):
        root.set_requires_all_reduce(last)
        # FSDP waits for pending reductions only after the last backward pass.
        root.set_is_last_backward(last)
        if keeps_gathered:
            root.set_reshard_after_backward(last)


def reshard(root: nn.Module) -> None:
    """After a forward pass without a backward pass: drop the gathered weights."""
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
