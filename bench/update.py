"""Time of an update from the trainer's weights to an engine's: as a file, or by gloo from memory.

    python -m bench.update             a Qwen3 of 115M parameters
    python -m bench.update --large     Qwen3-0.6B's shape; needs 16 GB of memory

Two processes have a copy of the model each. The engine's process uses the embedded engine's code:
read or receive, check, copy into place. A file is written to and read from the disk of ``--folder``
(default: a temporary one); gloo sends over loopback. Figures are wall-clock and CPU seconds of both
processes together, medians of five versions after a first one, which connects them.
"""

from __future__ import annotations

import argparse
import multiprocessing
import shutil
import statistics
import sys
import tempfile
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from bench.publish import cpu_seconds, make_model, timed
from bench.records import record
from prime_rl.trainer.published import Publisher, published_dtypes, published_tensors
from prime_rl_broadcast.connection import Member, header_of
from prime_rl_broadcast.group import BroadcastGroup
from prime_rl_embedded.weights import apply_weights, read_weights, receive_weights

VERSIONS = 6
WAYS = ("file", "memory")
DTYPES = {"float32": None, "bfloat16": torch.bfloat16}


def group_of(folder: Path, version: int) -> BroadcastGroup:
    """The broadcast group of trainer and engine, for rank 0."""
    directory = folder / f"group_{version}"
    directory.mkdir(parents=True, exist_ok=True)
    return BroadcastGroup(
        directory=str(directory),
        group=str(folder),
        backend="gloo",
        rank=0,
        world_size=2,
        timeout=60.0,
        loopback=True,
    )


def serve(shape: str, pipe: Connection) -> None:
    """The engine: loads versions until it receives None, and sends the CPU seconds of each."""
    torch.set_num_threads(1)
    module = make_model(shape)
    member = Member()
    pipe.send(0.0)
    while (update := pipe.recv()) is not None:
        before = cpu_seconds()
        way, folder, version = update
        with torch.inference_mode():
            if way == "file":
                weights = read_weights(Publisher(folder, 2).path(version), module)
            else:
                weights = receive_weights(group_of(folder, version).for_worker(1), member, module)
            apply_weights(weights, module)
        pipe.send(cpu_seconds() - before)


class Trainer:
    """The trainer's process."""

    def __init__(self, shape: str, pipe: Connection) -> None:
        self.model = make_model(shape)
        self.pipe = pipe
        self.member = Member()

    def update(self, way: str, dtype: str, folder: Path, version: int) -> float:
        """Send one version. Returns the engine's CPU seconds."""
        if way == "file":
            publisher = Publisher(folder, 2, dtype)  # type: ignore[arg-type]
            publisher.write(self.model, version)
            publisher.announce(version)
            self.pipe.send((way, folder, version))
        else:
            self.pipe.send((way, folder, version))
            self.send(group_of(folder, version), dtype)
        return float(self.pipe.recv())

    def send(self, group: BroadcastGroup, dtype: str) -> None:
        tensors = published_tensors(self.model)
        header = header_of(tensors, published_dtypes(self.model, tensors, DTYPES[dtype]))
        with self.member.join(group, torch.device("cpu")) as joined:
            joined.send(header, tensors.values())

    def measure(self, way: str, dtype: str, folder: Path) -> tuple[float, float]:
        """Medians of wall-clock and CPU seconds of both processes."""
        figures = []
        for version in range(1, VERSIONS + 1):
            theirs: list[float] = []
            act = partial(self.update, way, dtype, folder, version)
            wall, cpu = timed(lambda act=act, theirs=theirs: theirs.append(act()))  # type: ignore[misc]
            figures.append((wall, cpu + theirs[0]))
        walls, cpus = zip(*figures[1:], strict=True)
        return statistics.median(walls), statistics.median(cpus)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.update")
    parser.add_argument("--large", action="store_true", help="Qwen3-0.6B's shape")
    parser.add_argument("--folder", type=Path, help="folder of the files")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    shape = "Qwen3-0.6B" if options.large else "115M"
    ours, theirs = multiprocessing.Pipe()
    engine = multiprocessing.get_context("spawn").Process(target=serve, args=(shape, theirs))
    engine.start()
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        trainer = Trainer(shape, ours)
        ours.recv()
        print(f"{'way':<10}{'type':<12}{'wall s':>9}{'CPU s':>9}")
        for way in WAYS:
            for dtype in DTYPES:
                place = folder / f"{way}_{dtype}"
                place.mkdir()
                wall, cpu = trainer.measure(way, dtype, place)
                print(f"{way:<10}{dtype:<12}{wall:>9.2f}{cpu:>9.2f}", flush=True)
                key = "large" if options.large else "small"
                record(f"update.{key}.{way}_{dtype}.wall", wall, "s")
                record(f"update.{key}.{way}_{dtype}.cpu", cpu, "CPU s")
                shutil.rmtree(place)
    finally:
        ours.send(None)
        engine.join()
        shutil.rmtree(folder)


if __name__ == "__main__":
    main(sys.argv[1:])
