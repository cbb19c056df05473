"""The trainer's side of a broadcast, where a disk refuses: it waits, and goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from prime_rl.broadcast.meeting import FILES_WANTED, MEMORY, decline, has_files
from prime_rl.config.broadcast import WeightBroadcastConfig
from prime_rl.run.status import Status
from prime_rl.trainer import broadcaster as module
from prime_rl.trainer.broadcaster import Broadcaster
from prime_rl.trainer.weights import Publisher


@pytest.fixture
def broadcaster(tmp_path: Path) -> Broadcaster:
    model: Any = torch.nn.Linear(2, 3)
    config = WeightBroadcastConfig(type="gloo")
    publisher = Publisher(tmp_path, keep=2)
    return Broadcaster(model, publisher, config, torch.device("cpu"), Status(None))


def full_once(action: Callable[[Path], Any]) -> Callable[[Path], Any]:
    refusals = [OSError(28, "No space left on device")]

    def act(path: Path) -> Any:
        if refusals:
            raise refusals.pop()
        return action(path)

    return act


def test_a_full_disk_delays_a_version_that_waits_in_memory(
    broadcaster: Broadcaster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PUBLISH_WAITS", [0.0])
    monkeypatch.setattr(Path, "touch", full_once(Path.touch))
    broadcaster.prepare(1, exact=False, last=False)
    assert (tmp_path / "step_1" / MEMORY).exists()


def test_a_full_disk_delays_the_files_that_are_wanted_instead(
    broadcaster: Broadcaster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "DISK_SECONDS", 0.0)
    monkeypatch.setattr(module, "decline", full_once(decline))
    broadcaster.prepare(1, exact=False, last=False)
    (tmp_path / FILES_WANTED).touch()
    passing_on = threading.Thread(target=broadcaster.pass_on, daemon=True)
    passing_on.start()
    passing_on.join(20)
    assert has_files(tmp_path / "step_1") and not (tmp_path / FILES_WANTED).exists()
