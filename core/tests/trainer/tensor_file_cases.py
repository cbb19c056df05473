"""Files that 1, 2 and 4 ranks write together, and what each rank had to do for that.

``python tensor_file_cases.py FOLDER``. Ranks are forks: one import for all.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from prime_rl import WeightsError
from prime_rl.rundir.launch import STORE
from prime_rl.trainer import parallel, tensor_file
from prime_rl.trainer.rank import Rank

MESHES = {"one": (1, 1), "two": (2, 1), "four": (4, 1), "replicas": (2, 2), "two_by_two": (4, 2)}
"""Ranks, and copies of the model among them."""


class Block(nn.Module):
    """Rows that divide by no number of ranks, and fewer than there are ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.uneven = nn.Parameter(torch.randn(7, 5))
        self.few = nn.Parameter(torch.randn(3, 2, 2))
        self.vector = nn.Parameter(torch.randn(8), requires_grad=False)
        self.register_buffer("steps", torch.arange(6).view(2, 3))


def make_tensors(replicas: int) -> dict[str, Tensor]:
    """As a rank holds them: shards of rows, a tensor that all hold, one sharded by columns."""
    torch.manual_seed(0)
    root = nn.Sequential(Block(), Block())
    columns, scalar = torch.randn(4, 6), torch.randn(())
    if parallel.several_ranks():
        parallel.shard(root, {"Block"}, torch.device("cpu"), replicas)
    tensors: dict[str, Tensor] = {**root.state_dict(keep_vars=True), "scalar": scalar}
    uneven = tensors["0.uneven"]
    if isinstance(uneven, DTensor) and replicas == 1:
        columns = distribute_tensor(columns, uneven.device_mesh, [Shard(1)])
    return tensors | {"columns": columns}


class Disk:
    """Stands in for ``os.pwrite``: counts bytes, writes short, and may be full."""

    def __init__(self) -> None:
        self.written, self.is_full, self.pwrite = 0, False, os.pwrite

    def __call__(self, file: int, data: memoryview, offset: int) -> int:
        if self.is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.written += (size := self.pwrite(file, data[:33], offset))
        return size


def attempt(write: Callable[[], None]) -> str:
    """Whether it was written, or the error."""
    try:
        write()
    except (OSError, WeightsError) as error:
        return f"{type(error).__name__}: {error}"
    return "done"


def do(folder: Path, replicas: int) -> dict[str, Any]:
    """Write files in every way; what this rank saw."""
    tensors, disk, last = make_tensors(replicas), Disk(), parallel.num_ranks() - 1
    layout = tensor_file.lay_out(tensors)
    os.pwrite = disk  # type: ignore[assignment]

    def write(name: str, layout: tensor_file.Layout = layout) -> str:
        path = folder / f"{name}.safetensors"
        return attempt(lambda: tensor_file.write_shared(path, layout, tensors))

    seen: dict[str, Any] = {"shared": write("shared"), "written": disk.written}
    flushed: list[int] = []
    os.fsync = flushed.append  # type: ignore[assignment]
    tensor_file.write_shared(folder / "flushed.safetensors", layout, tensors, flush=True)
    seen["flushed"] = len(flushed)
    dtypes = dict.fromkeys(("0.uneven", "1.few", "columns"), torch.bfloat16)
    write("rounded", tensor_file.lay_out(tensors, dtypes))
    disk.is_full = parallel.rank() == last
    seen["full"] = write("full")
    disk.is_full = False
    seen["again"] = write("again")
    there, disk.written = tensor_file._is_there, 0
    if parallel.rank() == last:  # another machine, with a disk of its own
        tensor_file._is_there = lambda *_: False
    seen["apart"], seen["written_apart"] = write("apart"), disk.written
    tensor_file._is_there = there

    def gathered(stream: Any) -> None:
        tensor_file.write_stream(folder / "gathered.safetensors", tensors, stream)

    parallel.stream_to_main(tensors, gathered)
    return seen | {"patience": patience(tensors["0.uneven"])}


def patience(shard: Tensor) -> list[float]:
    """Timeouts in hours of each dimension of the mesh."""
    groups = shard.device_mesh.get_all_groups() if isinstance(shard, DTensor) else []
    backends = [group._get_backend(torch.device("cpu")) for group in groups]
    return [backend.options._timeout.total_seconds() / 3600 for backend in backends]


def start_rank(folder: Path, rank: int, num_ranks: int, replicas: int) -> int:
    """The process id of a rank."""
    if (pid := os.fork()) > 0:
        return pid
    local = rank % 2 if num_ranks == 4 else rank  # as if four were on two machines
    names = {"RANK": rank, "LOCAL_RANK": local, "WORLD_SIZE": num_ranks, STORE: folder / "store"}
    os.environ |= {name: str(value) for name, value in names.items()}
    code = 1
    try:
        with parallel.joined(Rank.of_process(), torch.device("cpu")):
            seen = parallel.gather(do(folder, replicas))
            parallel.on_main(lambda: (folder / "seen.json").write_text(json.dumps(seen)))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def main(folder: Path) -> int:
    """All meshes at once; 0 if every rank ended well."""
    pids = []
    for name, (num_ranks, replicas) in MESHES.items():
        (folder / name).mkdir()
        pids += [start_rank(folder / name, n, num_ranks, replicas) for n in range(num_ranks)]
    return max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
