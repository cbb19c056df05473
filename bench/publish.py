"""The cost of publishing a version as a file, gathered by rank 0 or written by all ranks, in
float32 or bfloat16, and of a file with only the changed values.

    python -m bench.publish            a Qwen3 of 115M parameters, 459 MB
    python -m bench.publish --large    Qwen3-0.6B's shape, 2.4 GB; needs 16 GB of memory

The file is written to ``--folder`` (default: a temporary one), whose disk is part of the
measurement. With ``gathered``, rank 0 gathers one tensor after the other and writes all of them.
With ``thread``, the ranks copy the weights, which is the time, and a thread writes the file: CPU
seconds are of both.
Seconds are medians of three: wall-clock of the slowest rank, and CPU of all ranks together. Ranks
share the machine's cores and communicate over loopback.

A delta of version n has the position (4 bytes) and the new value (2 bytes) of every bfloat16 number
that differs from version n - 1. Their share is counted after real AdamW steps on random tokens at
the default learning rate, 1e-6. Seconds are CPU to make and write, CPU to read and load, and their
sum plus the transfer time over a link.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from bench.gpu.trainer import SHAPES as QWEN3
from bench.records import record
from prime_rl.config.trainer import OptimConfig
from prime_rl.plugins.trainer import AdamWConfig, AdamWMaker
from prime_rl.rundir.launch import STORE
from prime_rl.trainer import parallel
from prime_rl.trainer.device import Precision
from prime_rl.trainer.file_writer import FileWriter
from prime_rl.trainer.optim import build_optimizer, clip_gradients
from prime_rl.trainer.published import Publisher, published_dtypes, published_tensors
from prime_rl.trainer.rank import Rank
from prime_rl.trainer.tensor_file import lay_out, write_shared, write_stream

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
    },
    "115M": {
        "vocab_size": 32_768,
        "hidden_size": 768,
        "intermediate_size": 2304,
        "num_hidden_layers": 13,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "head_dim": 64,
    },
    "Qwen3-0.6B": QWEN3["qwen3-0.6b"],
}
MESHES = {"1": (1, 1), "2": (2, 1), "4": (4, 1), "2 x 2": (4, 2)}
"""Name -> (ranks, replicas of the model)."""
REPEATS = 3
STEPS = 5
TOKENS = 64
LINKS = (1, 10, 100)
"""Gbit/s between trainer and engine."""
Write = Callable[[Path], None]


def make_model(shape: str) -> PreTrainedModel:
    """Random weights, tied embeddings."""
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**SHAPES[shape], tie_word_embeddings=True)).eval()


def writers(model: PreTrainedModel) -> dict[str, Write]:
    """Ways to publish, by name. Every rank calls each of them."""
    tensors = published_tensors(model)
    rounded = published_dtypes(model, tensors, torch.bfloat16)
    like = {name: torch.empty_like(tensors[name], dtype=dtype) for name, dtype in rounded.items()}

    def gathered(like: Mapping[str, Tensor], dtype: torch.dtype | None, path: Path) -> None:
        write = partial(write_stream, path, like)
        sent = tensors if dtype is None else {n: t.detach().to(dtype) for n, t in tensors.items()}
        parallel.stream_to_main(sent, write)

    def together(dtypes: Mapping[str, torch.dtype], path: Path) -> None:
        write_shared(path, lay_out(tensors, dtypes), tensors)

    return {
        "gathered, float32": partial(gathered, tensors, None),
        "together, float32": partial(together, {}),
        "gathered, bfloat16": partial(gathered, like, torch.bfloat16),
        "together, bfloat16": partial(together, rounded),
    }


def cpu_seconds() -> float:
    """CPU seconds of this process, all threads."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def timed(action: Callable[[], object]) -> tuple[float, float]:
    """Wall-clock and CPU seconds."""
    wall = time.perf_counter()
    cpu = cpu_seconds()
    action()
    return time.perf_counter() - wall, cpu_seconds() - cpu


def measure(write: Write, path: Path) -> dict[str, float]:
    """Medians over the repeats: wall-clock of the slowest rank, and the sum of the ranks' CPU."""
    walls = []
    cpus = []
    for _ in range(REPEATS):
        parallel.gather(None)
        both = parallel.gather(timed(partial(write, path)))
        walls.append(max(wall for wall, _ in both))
        cpus.append(sum(cpu for _, cpu in both))
        size = path.stat().st_size
        parallel.gather(None)
        parallel.on_main(path.unlink)
    wall = statistics.median(walls)
    cpu = statistics.median(cpus)
    return {"MB": size / 1e6, "wall": wall, "cpu": cpu}


def measure_rank(model: PreTrainedModel, folder: Path, replicas: int) -> dict[str, Any]:
    """Measure all ways to publish, as one of the ranks."""
    if parallel.several_ranks():
        parallel.shard(model, {"Qwen3DecoderLayer"}, device=torch.device("cpu"), replicas=replicas)
    path = folder / "model.safetensors"
    seconds = {name: measure(write, path) for name, write in writers(model).items()}
    kinds: tuple[Precision, ...] = ("float32", "bfloat16")
    return seconds | {f"thread, {each}": measure_thread(model, folder, each) for each in kinds}


def measure_thread(model: PreTrainedModel, folder: Path, dtype: Precision) -> dict[str, float]:
    """As ``measure``, of what the trainer waits for. The first version makes the buffers."""
    publisher = Publisher(folder / "broadcasts", 1, dtype)
    writer = FileWriter(model, publisher, lambda version: None)
    walls = []
    cpus = []
    for version in range(1, REPEATS + 2):
        parallel.gather(None)
        before = cpu_seconds()
        wall, _ = timed(writer.copy)
        writer.submit(version)
        writer.wait()
        both = parallel.gather([wall, cpu_seconds() - before])
        walls.append(max(wall for wall, _ in both))
        cpus.append(sum(cpu for _, cpu in both))
    size = publisher.size(version)
    parallel.gather(None)
    parallel.on_main(partial(shutil.rmtree, publisher.directory))
    wall = statistics.median(walls[1:])
    cpu = statistics.median(cpus[1:])
    return {"MB": size * 2**20 / 1e6, "wall": wall, "cpu": cpu}


def in_fork(work: Callable[[], object], env: Mapping[str, str]) -> int:
    """Fork a process that calls ``work``. Returns its id. Forked ranks share the model's memory
    until they shard it."""
    if (pid := os.fork()) > 0:
        return pid
    code = 1
    try:
        os.environ |= env
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def on_ranks(model: PreTrainedModel, folder: Path, num_ranks: int, replicas: int) -> dict[str, Any]:
    """Measure with the ranks of one mesh. Raises ``RuntimeError`` if a rank fails."""

    def rank() -> None:
        with parallel.joined(Rank.of_process(), torch.device("cpu")):
            figures = measure_rank(model, folder, replicas)
            parallel.on_main(
                lambda: (folder / "found.json").write_text(json.dumps(figures), "utf-8")
            )

    store = {"WORLD_SIZE": str(num_ranks), STORE: str(folder / "store")}
    envs = ({"RANK": str(n), "LOCAL_RANK": str(n)} for n in range(num_ranks))
    pids = [in_fork(rank, store | env) for env in envs]
    codes = [os.waitpid(pid, 0)[1] for pid in pids]
    if any(codes):
        raise RuntimeError(f"a rank of {num_ranks} failed; see above")
    (folder / "store").unlink(missing_ok=True)
    figures: dict[str, Any] = json.loads((folder / "found.json").read_text("utf-8"))
    return figures


def rounded(model: PreTrainedModel) -> dict[str, Tensor]:
    """A version in bfloat16, as in an engine."""
    return {name: tensor.detach().bfloat16() for name, tensor in published_tensors(model).items()}


def train(model: PreTrainedModel) -> Iterator[None]:
    """AdamW steps with default settings, on random tokens."""
    optimizer = build_optimizer(AdamWMaker(AdamWConfig()), model, lr=1e-6, weight_decay=0.01)
    vocab = model.config.vocab_size
    for _ in range(STEPS):
        ids = torch.randint(1, vocab, (1, TOKENS))
        torch.autograd.backward(model(ids, labels=ids, use_cache=False).loss)
        clip_gradients(model.parameters(), OptimConfig().max_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield


def make_delta(old: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Positions and values of the numbers that differ."""
    delta = {}
    for name, tensor in new.items():
        before, now = (each.view(torch.int16).reshape(-1).numpy() for each in (old[name], tensor))
        changed = np.flatnonzero(before != now)
        delta[f"{name} at"] = torch.from_numpy(changed.astype(np.int32))
        delta[f"{name} is"] = torch.from_numpy(now[changed])
    return delta


def write_delta(old: Mapping[str, Tensor], new: Mapping[str, Tensor], path: Path) -> None:
    """Publish a delta, as the trainer would."""
    delta = make_delta(old, new)
    write_stream(path, delta, iter(delta.values()))


def apply_delta(served: Mapping[str, Tensor], path: Path) -> None:
    """Load a delta, as an engine would."""
    delta = load_file(path)
    for name, tensor in served.items():
        flat = tensor.view(torch.int16).view(-1)
        flat[delta[f"{name} at"].long()] = delta[f"{name} is"]


def apply_whole(served: Mapping[str, Tensor], path: Path) -> None:
    """Load a whole version."""
    for name, tensor in load_file(path).items():
        served[name].copy_(tensor)


def measure_delta(model: PreTrainedModel, folder: Path) -> dict[str, Any]:
    """The changed share of each step; size and CPU seconds of the last delta and of the whole
    version. Raises ``RuntimeError`` if old weights plus delta differ from the new weights."""
    shares = []
    old = rounded(model)
    new = rounded(model)
    for _ in train(model):
        old = new
        new = rounded(model)
        changed = sum(int((old[name] != tensor).sum()) for name, tensor in new.items())
        shares.append(changed / sum(tensor.numel() for tensor in new.values()))
    served = {name: tensor.clone() for name, tensor in old.items()}
    delta = folder / "delta.safetensors"
    whole = folder / "whole.safetensors"
    write_whole = writers(model)["together, bfloat16"]
    ways = {
        "delta": measure_way(partial(write_delta, old, new), partial(apply_delta, served), delta),
    }
    if any(not served[name].equal(tensor) for name, tensor in new.items()):
        raise RuntimeError("old weights plus delta differ from the new weights")
    ways["all"] = measure_way(write_whole, partial(apply_whole, served), whole)
    return {"shares": shares, "ways": ways}


def measure_way(make: Write, load: Write, path: Path) -> dict[str, float]:
    """CPU seconds of both ends, and the file's size."""
    made, loaded = ([timed(partial(end, path))[1] for _ in range(REPEATS)] for end in (make, load))
    return {
        "MB": path.stat().st_size / 1e6,
        "make": statistics.median(made),
        "load": statistics.median(loaded),
    }


def report_delta(found: dict[str, Any]) -> list[str]:
    """Lines to print: the changed shares, and seconds from trainer to engine over links."""
    shares = ", ".join(f"{share:.2%}" for share in found["shares"])
    lines = [
        f"bfloat16 values that change, steps 1 to {STEPS}: {shares}",
        f"{'':<8}{'MB':>7}{'make s':>9}{'load s':>9}" + "".join(f"{n:>7} Gbit/s" for n in LINKS),
    ]
    for name, way in found["ways"].items():
        cpu = way["make"] + way["load"]
        over = [cpu + way["MB"] * 8e-3 / link for link in LINKS]
        lines.append(
            f"{name:<8}{way['MB']:>7.0f}{way['make']:>9.2f}{way['load']:>9.2f}"
            + "".join(f"{seconds:>14.2f}" for seconds in over)
        )
    return lines


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.publish")
    parser.add_argument("--large", action="store_true", help="Qwen3-0.6B's shape")
    parser.add_argument("--folder", type=Path, help="folder of the files")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    model = make_model("Qwen3-0.6B" if options.large else "115M")
    shape = "large" if options.large else "small"
    try:
        print(f"{'ranks':<8}{'way':<22}{'MB':>7}{'wall s':>9}{'CPU s':>9}")
        for ranks, mesh in MESHES.items():
            for way, cost in on_ranks(model, folder, *mesh).items():
                figures = f"{cost['MB']:>7.0f}{cost['wall']:>9.2f}{cost['cpu']:>9.2f}"
                print(f"{ranks:<8}{way:<22}{figures}", flush=True)
                key = f"publish.{shape}.{ranks}.{way}".replace(", ", "_").replace(" ", "")
                record(f"{key}.wall", cost["wall"], "s")
                record(f"{key}.cpu", cost["cpu"], "CPU s")
        print("\n".join(report_delta(measure_delta(model, folder))))
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main(sys.argv[1:])
