"""A version is sent from a copy while the trainer takes its next step, to an engine in a process of
its own."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from small_training import PolicyGradient
from torch import Tensor
from trainer_fixtures import batches as batches
from trainer_fixtures import model_dir as model_dir
from waiting import LIMIT, eventually

from prime_rl import ConfigError, PluginConfig, WeightsError
from prime_rl.config.trainer import TrainerConfig
from prime_rl.registry.components import installed_losses
from prime_rl.rundir.status import Status
from prime_rl.trainer.loop import Trainer
from prime_rl.trainer.model import load_model
from prime_rl.trainer.publish import Broadcaster
from prime_rl.trainer.published import Publisher
from prime_rl.wire import MicroBatch
from prime_rl_broadcast import connection as connection_module
from prime_rl_broadcast import sender as sender_module
from prime_rl_broadcast.group import BroadcastGroup
from prime_rl_broadcast.sender import BroadcastSender

BUCKET = 4096
"""Bytes: the tiny model takes many."""
ENGINE = """
import sys, time, os
from pathlib import Path
import torch
from safetensors.torch import save_file
from prime_rl_broadcast import connection
from prime_rl_broadcast.group import BroadcastGroup
connection.BUCKET_BYTES = int(sys.argv[2])
folder, member, last = Path(sys.argv[1]), connection.Member(), int(sys.argv[3])
for version in range(1, last + 1):
    meeting = folder / f"meeting_{version}"
    while not meeting.exists():
        time.sleep(0.005)
    group = BroadcastGroup(directory=str(meeting), group=str(folder / "group"), backend="gloo",
        rank=1, world_size=2, timeout=float(sys.argv[4]), loopback=True)
    received = {}
    def take(stream):
        for number, (name, tensor) in enumerate(stream):
            received[name] = tensor
            if number == 0:
                (folder / f"first_{version}").touch()
                while not (folder / f"go_{version}").exists():
                    time.sleep(0.005)
                if (folder / "die").exists():
                    os._exit(9)
    with member.join(group, torch.device("cpu")) as joined:
        joined.receive(lambda header: None, take)
    save_file(received, folder / f".received_{version}")
    os.rename(folder / f".received_{version}", folder / f"received_{version}.safetensors")
os._exit(0)  # as engines end: a thread of gloo aborts a process now and then that ends otherwise
"""


class Run:
    """A trainer, and an engine that takes one tensor of each version and then waits for a file."""

    def __init__(self, folder: Path, model_dir: Path, overlap: Any = True, **trainer: Any) -> None:
        self.folder = folder
        config = TrainerConfig.model_validate({"device": "cpu", "optim": {"lr": 0.1}} | trainer)
        losses = installed_losses().with_rl(PolicyGradient(PluginConfig()))
        self.trainer = Trainer(load_model(model_dir, config), losses, config, 9)
        self.publisher = Publisher(folder / "broadcasts", 9, config.publish_dtype)
        self.sender = BroadcastSender(None, overlap)
        given = (self.trainer.model, self.publisher, self.sender, Status(None))
        self.broadcaster = Broadcaster(*given)
        (folder / "group").mkdir()

    def engine(self, versions: int = 1) -> subprocess.Popen[bytes]:
        given = [str(self.folder), str(BUCKET), str(versions), str(LIMIT)]
        return subprocess.Popen([sys.executable, "-c", ENGINE, *given])

    def publish(self, version: int) -> dict[str, Tensor]:
        """The weights as they are now, once the trainer could go on."""
        meeting = BroadcastGroup(
            directory=str(self.folder / f"meeting_{version}"),
            group=str(self.folder / "group"),
            backend="gloo",
            rank=0,
            world_size=2,
            timeout=LIMIT,
            loopback=True,
        )
        Path(meeting.directory).mkdir()
        now = {n: t.clone() for n, t in self.trainer.model.named_parameters()}
        self.broadcaster.prepare(version, exact=False, last=False)
        meeting.open(self.publisher.path(version))  # as the orchestrator, when it sees the version
        self.broadcaster.announce(last=False)
        return now

    def step(self, number: int, batch: MicroBatch) -> None:
        before = [p.clone() for p in self.trainer.model.parameters()]
        self.trainer.train_step(number, [batch])
        parameters = list(self.trainer.model.parameters())
        assert not any(p.equal(b) for p, b in zip(parameters, before, strict=True))


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "BUCKET_BYTES", BUCKET)


@pytest.fixture
def started() -> Iterator[Callable[[subprocess.Popen[bytes]], subprocess.Popen[bytes]]]:
    processes: list[subprocess.Popen[bytes]] = []

    def start(process: subprocess.Popen[bytes]) -> subprocess.Popen[bytes]:
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.wait()


def equal(found: dict[str, Tensor], expected: dict[str, Tensor], dtype: torch.dtype) -> bool:
    assert found.keys() == expected.keys()
    return all(each.equal(expected[name].to(dtype)) for name, each in found.items())


@pytest.mark.slow
def test_two_steps_change_the_weights_before_the_engine_has_the_last_byte_of_a_version(
    tmp_path: Path, model_dir: Path, batches: list[MicroBatch], started: Any
) -> None:
    """The engine takes the rest of each version after the step that follows it, and has that
    version bit for bit, rounded."""
    run = Run(tmp_path, model_dir, publish_dtype="bfloat16")
    engine = started(run.engine(versions=2))
    for version in (1, 2):
        run.step(version, batches[version])
        published = run.publish(version)
        eventually((tmp_path / f"first_{version}").exists, engine)
        run.step(version + 1, batches[version + 1])
        assert not (tmp_path / f"received_{version}.safetensors").exists()
        (tmp_path / f"go_{version}").touch()
        eventually((tmp_path / f"received_{version}.safetensors").exists, engine)
        found = load_file(tmp_path / f"received_{version}.safetensors")
        assert len(found) == 24 and equal(found, published, torch.bfloat16)
    run.sender.finish()
    assert engine.wait() == 0
    assert not list((tmp_path / "broadcasts").rglob("*.safetensors"))


@pytest.mark.slow
def test_files_of_that_version_follow_if_the_engine_dies_in_the_midst_of_it(
    tmp_path: Path,
    model_dir: Path,
    batches: list[MicroBatch],
    started: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = Run(tmp_path, model_dir)
    engine = started(run.engine())
    published = run.publish(1)
    eventually((tmp_path / "first_1").exists, engine)
    run.step(1, batches[0])
    (tmp_path / "die").touch()
    (tmp_path / "go_1").touch()
    with caplog.at_level(logging.WARNING):
        run.sender.finish()
    assert "step_1 was not broadcast, its files follow: the broadcast failed" in caplog.text
    found = load_file(run.publisher.path(1) / "model.safetensors")
    assert equal(found, published, torch.float32)


def test_the_next_version_raises_an_error_of_the_thread_with_its_cause(
    tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    def fail(*_: object) -> None:
        raise ValueError("a bug")

    run = Run(tmp_path, model_dir)
    monkeypatch.setattr(sender_module, "write_copy", refuse)
    monkeypatch.setattr(BroadcastGroup, "wait_for_all", refuse)
    run.publish(1)
    with pytest.raises(WeightsError, match=r"step_1 were neither sent nor written: .*No space"):
        run.publish(2)
    monkeypatch.setattr(BroadcastGroup, "wait_for_all", fail)
    run.publish(3)
    with pytest.raises(ValueError, match="a bug"):
        run.publish(4)
    run.sender.finish()  # each error once


@pytest.mark.parametrize(("overlap", "waits"), [("auto", False), (False, True), ("auto", True)])
def test_without_memory_or_if_it_is_off_the_trainer_waits_for_the_engines(
    tmp_path: Path,
    model_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    overlap: Any,
    waits: bool,
) -> None:
    """Whether the sender is in the trainer's thread when it waits for the members."""
    threads: list[threading.Thread] = []

    def note(*_: object) -> None:
        threads.append(threading.current_thread())
        raise WeightsError("no engine is there")

    size = 4 * 20_576  # bytes of the tiny model
    monkeypatch.setattr(BroadcastGroup, "wait_for_all", note)
    free = size - 1 if waits else size
    monkeypatch.setattr(sender_module, "free_memory", lambda device: float(free))
    run = Run(tmp_path, model_dir, overlap)
    assert sum(p.numel() for p in run.trainer.model.parameters()) * 4 == size
    with caplog.at_level(logging.INFO):
        run.publish(1)
        run.sender.finish()
    assert [each is threading.main_thread() for each in threads] == [waits]
    assert (run.publisher.path(1) / "model.safetensors").exists()  # by the sender
    assert ("are free for it (weight_broadcast.overlap)" in caplog.text) == (
        waits and overlap == "auto"
    )


def test_an_overlap_that_was_asked_for_and_has_no_memory_is_refused(
    tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(sender_module, "new_buffer", refuse)
    with pytest.raises(ConfigError, match=r"overlap is true, and a copy .* takes 0\.00 GiB: CUDA"):
        Run(tmp_path, model_dir).publish(1)
