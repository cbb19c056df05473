"""A thread writes weights: the trainer goes on, and a version is announced when it is whole."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from waiting import eventually

from prime_rl import WeightsError
from prime_rl.rundir.status import Status
from prime_rl.trainer import published
from prime_rl.trainer.file_writer import FileWriter
from prime_rl.trainer.publish import Broadcaster
from prime_rl.trainer.published import Publisher
from prime_rl.weights.versions import newest_version


class Disk:
    """Stands in for ``os.pwrite``: waits until it is ``open``, and may be full."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open, self.is_full, self._pwrite = threading.Event(), False, os.pwrite
        monkeypatch.setattr(os, "pwrite", self)

    def __call__(self, file: int, data: memoryview, offset: int) -> int:
        assert self.open.wait(60)
        if self.is_full:
            raise OSError(28, "No space left on device")
        return self._pwrite(file, data, offset)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


@pytest.fixture
def model() -> Any:
    return torch.nn.Linear(2, 3)


@pytest.fixture
def announced() -> list[int]:
    return []


@pytest.fixture
def broadcaster(tmp_path: Path, model: Any, announced: list[int]) -> Broadcaster:
    publisher = Publisher(tmp_path, keep=3, dtype="bfloat16")
    model._keep_in_fp32_modules_strict = None
    return Broadcaster(model, publisher, None, Status(None), announced.append)


def set_to(model: Any, value: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)


def step(broadcaster: Broadcaster, version: int, **settings: bool) -> None:
    """Publish what the weights are: the number of the version, and a bit that bfloat16 lacks."""
    set_to(broadcaster._model, version + 2**-12)
    broadcaster.prepare(version, **({"exact": False, "last": False} | settings))
    set_to(broadcaster._model, 99.0)  # the next step
    broadcaster.announce(settings.get("last", False))


def weights(folder: Path, version: int) -> set[tuple[float, torch.dtype]]:
    found = load_file(folder / f"step_{version}/model.safetensors")
    assert {name: list(each.shape) for name, each in found.items()} == {
        "weight": [3, 2],
        "bias": [3],
    }
    return {(value, each.dtype) for each in found.values() for value in each.flatten().tolist()}


def test_the_trainer_goes_on_while_a_version_is_written(
    broadcaster: Broadcaster, disk: Disk, tmp_path: Path, announced: list[int]
) -> None:
    step(broadcaster, 1)
    step(broadcaster, 2)
    writer = broadcaster._writer
    buffers = [own["weight"].data_ptr() for _, own in writer._jobs]
    assert len(set(buffers)) == 2 and newest_version(tmp_path) is None and announced == []
    third = threading.Thread(target=step, args=(broadcaster, 3))
    third.start()  # waits for the first
    third.join(0.2)
    assert third.is_alive() and len(writer._jobs) <= 2
    disk.open.set()
    third.join(60)
    assert writer._jobs[-1][1]["weight"].data_ptr() in buffers  # there is no third set
    assert broadcaster.settle(exact=False) == tmp_path / "step_3"
    assert announced == [1, 2, 3] and newest_version(tmp_path) == 3
    for version in (1, 2, 3):
        assert weights(tmp_path, version) == {(float(version), torch.bfloat16)}


def test_a_version_in_line_is_written_before_one_that_is_kept(
    broadcaster: Broadcaster, disk: Disk, tmp_path: Path, announced: list[int]
) -> None:
    """A checkpoint's, which is not rounded, and the run's last: ``prepare`` writes them."""
    step(broadcaster, 1)
    threading.Timer(0.1, disk.open.set).start()
    step(broadcaster, 2, exact=True)
    assert announced == [1, 2] and weights(tmp_path, 2) == {(2 + 2**-12, torch.float32)}
    step(broadcaster, 3, last=True)
    assert announced == [1, 2, 3] and weights(tmp_path, 3) == {(3.0, torch.bfloat16)}


@pytest.mark.parametrize("where", ["waiting for a batch", "the next version", "the end"])
def test_an_error_of_the_disk_ends_the_trainer(
    broadcaster: Broadcaster, disk: Disk, tmp_path: Path, announced: list[int],
    monkeypatch: pytest.MonkeyPatch, where: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(published, "RETRY_SECONDS", 0.0)
    disk.is_full = True
    disk.open.set()
    step(broadcaster, 1)
    writer = broadcaster._writer
    eventually(lambda: writer._jobs[0][0].done())
    with pytest.raises(WeightsError, match=r"cannot write weights version 1 to .*No space left"):
        if where == "waiting for a batch":
            broadcaster.all_have(False)
        elif where == "the next version":
            step(broadcaster, 2)
        else:
            broadcaster.settle(exact=False)
    assert announced == [] and newest_version(tmp_path) is None


def test_a_full_disk_delays_a_version(
    broadcaster: Broadcaster, disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second attempt writes the copy, and not what the weights are by then."""
    monkeypatch.setattr(published.time, "sleep", lambda seconds: setattr(disk, "is_full", False))
    disk.is_full = True
    disk.open.set()
    step(broadcaster, 1)
    broadcaster.settle(exact=False)
    assert weights(tmp_path, 1) == {(1.0, torch.bfloat16)}


def test_an_adapter_is_left_to_the_trainer(tmp_path: Path, model: Any) -> None:
    model.prime_rl_tuning = object()
    assert not FileWriter(model, Publisher(tmp_path, keep=1), print).copy()
