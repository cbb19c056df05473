"""The trainer's side of a weight transport: what is sent, and when files are written instead."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from prime_rl import Header, TensorInfo, WeightSender, WeightsError
from prime_rl.rundir.status import Status
from prime_rl.trainer import broadcaster as module
from prime_rl.trainer.broadcaster import Broadcaster
from prime_rl.trainer.weights import Publisher
from prime_rl.weights.versions import FILES_WANTED, MEMORY, has_files


class Sender(WeightSender):
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.received: dict[str, Any] = {}
        self.header: Header = []
        self.fails = False

    def wait(self, directory: Path, files_wanted: Callable[[], bool]) -> object | None:
        return None if files_wanted() else {"to": directory.name}

    def send(self, order: object, header: Header, tensors: Iterator[torch.Tensor]) -> None:
        if self.fails:
            raise WeightsError("an engine did not come")
        names = [info.name for info in header]
        self.header = header
        self.received = {"order": order, **dict(zip(names, tensors, strict=True))}


@pytest.fixture
def sender() -> Sender:
    return Sender()


@pytest.fixture
def broadcaster(tmp_path: Path, sender: Sender) -> Broadcaster:
    model: Any = torch.nn.Linear(2, 3)
    return Broadcaster(model, Publisher(tmp_path, keep=2), sender, Status(None))


def test_a_version_is_sent_and_not_written(
    broadcaster: Broadcaster, sender: Sender, tmp_path: Path
) -> None:
    broadcaster.prepare(1, exact=False, last=False)
    assert (tmp_path / "step_1" / MEMORY).exists()
    assert broadcaster.size(1) == (6 + 3) * 4 / 2**20
    broadcaster.pass_on()
    assert sender.header == [TensorInfo("weight", "F32", [3, 2]), TensorInfo("bias", "F32", [3])]
    assert sender.received["order"] == {"to": "step_1"}
    model: Any = broadcaster._model
    assert torch.equal(sender.received["weight"], model.weight)
    assert not has_files(tmp_path / "step_1")


@pytest.mark.parametrize("kept", [{"exact": True, "last": False}, {"exact": False, "last": True}])
def test_a_version_that_is_kept_is_written_and_not_sent(
    broadcaster: Broadcaster, sender: Sender, tmp_path: Path, kept: dict[str, bool]
) -> None:
    broadcaster.prepare(1, **kept)
    assert broadcaster.pass_on() == 0.0
    assert has_files(tmp_path / "step_1") and not sender.received


def test_files_are_written_when_they_are_wanted_instead(
    broadcaster: Broadcaster, sender: Sender, tmp_path: Path
) -> None:
    broadcaster.prepare(1, exact=False, last=False)
    (tmp_path / FILES_WANTED).touch()
    broadcaster.pass_on()
    assert has_files(tmp_path / "step_1") and not (tmp_path / FILES_WANTED).exists()
    assert not sender.received


def test_files_follow_a_version_that_was_not_delivered(
    broadcaster: Broadcaster, sender: Sender, tmp_path: Path
) -> None:
    sender.fails = True
    broadcaster.prepare(1, exact=False, last=False)
    broadcaster.pass_on()
    assert has_files(tmp_path / "step_1")


def test_a_full_disk_delays_a_version_that_waits_in_memory(
    broadcaster: Broadcaster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusals, touch = [OSError(28, "No space left on device")], Path.touch

    def refuse_once(path: Path) -> None:
        if refusals:
            raise refusals.pop()
        touch(path)

    monkeypatch.setattr(module, "PUBLISH_WAITS", [0.0])
    monkeypatch.setattr(Path, "touch", refuse_once)
    broadcaster.prepare(1, exact=False, last=False)
    assert (tmp_path / "step_1" / MEMORY).exists() and not refusals
