"""The trainer's part of a checkpoint: exact, in the background, never incomplete."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from disks import SharedDisk
from small_training import Frames, PolicyGradient
from trainer_fixtures import maker_of
from transformers import PreTrainedModel
from waiting import LIMIT

from prime_rl import ConfigError, PluginConfig, WeightsError
from prime_rl.config.run import CkptConfig
from prime_rl.config.trainer import TrainerConfig
from prime_rl.registry.components import installed_losses
from prime_rl.rundir.checkpoints import finished, unfinished, whole_steps
from prime_rl.rundir.status import Status
from prime_rl.trainer import checkpoint, published
from prime_rl.trainer.checkpoint import Checkpointer, restore
from prime_rl.trainer.loop import Trainer, train
from prime_rl.trainer.model import load_model
from prime_rl.trainer.published import Publisher
from prime_rl.wire import MicroBatch

OFF = CkptConfig(enabled=False)


@pytest.fixture
def batches(batches: list[MicroBatch]) -> list[MicroBatch]:
    return batches[:6]


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(published, "RETRY_SECONDS", 0.0)


def make_trainer(folder: Path, lr: float = 1e-2, max_steps: int = 6, **more: Any) -> Trainer:
    config = TrainerConfig.model_validate({"optim": {"lr": lr}, "device": "cpu"} | more)
    loss = PolicyGradient(PluginConfig())
    losses = installed_losses().with_rl(loss)
    model = load_model(folder, config)
    return Trainer(model, losses, config, max_steps, maker=maker_of(config))


def run(
    trainer: Trainer,
    run_dir: Path,
    model_dir: Path,
    batches: Sequence[MicroBatch],
    *,
    first: int = 1,
    ckpt: CkptConfig = OFF,
) -> None:
    """As the process does it; the orchestrator's part of every checkpoint is there already."""
    for step in range(first, first + len(batches)):
        if ckpt.is_due(step, trainer.max_steps):
            part = unfinished(run_dir, step)
            part.orchestrator.mkdir(parents=True)
            part.progress.write_text("{}")
    checkpointer = Checkpointer(run_dir, ckpt, model_dir, None)
    trainer.max_steps = first + len(batches) - 1
    frames = Frames(first, [[batch] for batch in batches])
    train(trainer, frames, run_dir, first, Status(None), checkpointer)


def weights(trainer: Trainer) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in trainer.model.parameters()]


def same(a: Trainer, b: Trainer) -> bool:
    return all(torch.equal(x, y) for x, y in zip(weights(a), weights(b), strict=True))


@pytest.mark.parametrize(
    "settings", [{}, {"publish_dtype": "bfloat16"}, {"dtype": "bfloat16"}], ids=str
)
def test_three_steps_and_three_more_after_a_resume_are_six_bit_for_bit(
    tmp_path: Path, model_dir: Path, batches: list[MicroBatch], settings: dict[str, str]
) -> None:
    straight = make_trainer(model_dir, **settings)
    run(straight, tmp_path / "straight", model_dir, batches)
    first = make_trainer(model_dir, **settings)
    run(first, tmp_path / "run", model_dir, batches[:3], ckpt=CkptConfig(interval=3))
    saved = finished(tmp_path / "run", 3)
    resumed = make_trainer(saved.weights, **settings)
    assert same(resumed, first)
    generator = torch.get_rng_state()
    torch.manual_seed(99)
    restore(resumed, saved)
    assert torch.equal(torch.get_rng_state(), generator)
    run(resumed, tmp_path / "run", saved.weights, batches[3:], first=4)
    assert same(resumed, straight)
    without = make_trainer(saved.weights, **settings)  # it lacks the optimizer's state
    run(without, tmp_path / "without", saved.weights, batches[3:], first=4)
    assert not same(without, straight)


@pytest.mark.parametrize("published", ["float32", "bfloat16"])
@pytest.mark.parametrize("interval", [None, 3])
def test_a_run_that_is_stopped_after_three_steps_saves_them_unrounded(
    tmp_path: Path,
    model_dir: Path,
    batches: list[MicroBatch],
    published: str,
    interval: int | None,
) -> None:
    straight = make_trainer(model_dir)
    run(straight, tmp_path / "straight", model_dir, batches)
    first, run_dir = make_trainer(model_dir, publish_dtype=published), tmp_path / "run"
    unfinished(run_dir, 3).orchestrator.mkdir(parents=True)
    unfinished(run_dir, 3).progress.write_text("{}")
    frames = Frames(1, [*([batch] for batch in batches[:3]), []])  # an empty batch: stop
    checkpointer = Checkpointer(run_dir, CkptConfig(interval=interval), model_dir, None)
    train(first, frames, run_dir, 1, Status(None), checkpointer)
    assert whole_steps(run_dir) == [3]
    saved = finished(run_dir, 3)
    resumed = make_trainer(saved.weights)
    assert same(resumed, first)
    restore(resumed, saved)
    run(resumed, run_dir, saved.weights, batches[3:], first=4)
    assert same(resumed, straight)


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_a_checkpoint_before_the_first_step_that_trains_changes_nothing(
    tmp_path: Path, model_dir: Path, batches: list[MicroBatch], pack: Any, kind: str
) -> None:
    """To save the state of a new optimizer, torch makes it take a step at zero gradient."""
    ends = []
    for name, ckpt in (("without", OFF), ("with", CkptConfig(interval=1))):
        ends.append(make_trainer(model_dir, optim={"type": kind, "lr": 1e-2}))
        steps = [pack([[1, 2, 3]], prompt=3), *batches[:2]]
        run(ends[-1], tmp_path / name, model_dir, steps, ckpt=ckpt)
    assert same(*ends)
    saved = finished(tmp_path / "with", 1)
    resumed = make_trainer(saved.weights, optim={"type": kind, "lr": 1e-2})
    restore(resumed, saved)
    run(resumed, tmp_path / "with", saved.weights, batches[:2], first=2)
    assert same(resumed, ends[0])


def test_the_config_of_the_resumed_run_decides_on_the_learning_rate(
    tmp_path: Path, model_dir: Path, batches: list[MicroBatch]
) -> None:
    first = make_trainer(model_dir)
    run(first, tmp_path, model_dir, batches[:1], ckpt=CkptConfig(interval=1))
    resumed = make_trainer(finished(tmp_path, 1).weights, lr=0.5)
    restore(resumed, finished(tmp_path, 1))
    assert {group["lr"] for group in resumed.optimizer.param_groups} == {0.5}


def test_a_checkpoint_written_on_cpu_can_be_resumed_on_a_gpu(
    tmp_path: Path,
    model_dir: Path,
    batches: list[MicroBatch],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It has no state of a GPU's random numbers."""
    first = make_trainer(model_dir)
    run(first, tmp_path, model_dir, batches[:1], ckpt=CkptConfig(interval=1))
    resumed = make_trainer(finished(tmp_path, 1).weights)
    of_cpu = checkpoint._state
    monkeypatch.setattr(
        checkpoint, "_state", lambda trainer: of_cpu(trainer) | {"cuda_rng": torch.zeros(16)}
    )
    restore(resumed, finished(tmp_path, 1))
    moments = [state["exp_avg"] for state in resumed.optimizer.state.values()]
    assert any(moment.any() for moment in moments)


@pytest.fixture
def proceed(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """The writer is held until this is set."""
    event, real = threading.Event(), Checkpointer._attempt

    def held(self: Checkpointer, *arguments: Any, **named: Any) -> None:
        assert event.wait(LIMIT)
        real(self, *arguments, **named)

    monkeypatch.setattr(Checkpointer, "_attempt", held)
    return event


def test_the_state_is_of_its_step_although_training_goes_on_meanwhile(
    tmp_path: Path,
    model_dir: Path,
    batches: list[MicroBatch],
    monkeypatch: pytest.MonkeyPatch,
    proceed: threading.Event,
) -> None:
    """The writer is held until two more steps are trained."""
    wait = Checkpointer.wait
    monkeypatch.setattr(
        Checkpointer, "wait", lambda self, status: (proceed.set(), wait(self, status))
    )
    straight = make_trainer(model_dir)
    run(straight, tmp_path / "straight", model_dir, batches[:5])
    first = make_trainer(model_dir)
    proceed.clear()
    run(first, tmp_path / "run", model_dir, batches[:5], ckpt=CkptConfig(interval=3))
    assert whole_steps(tmp_path / "run") == [3]
    saved = finished(tmp_path / "run", 3)
    resumed = make_trainer(saved.weights)
    restore(resumed, saved)
    run(resumed, tmp_path / "run", saved.weights, batches[3:5], first=4)
    assert same(resumed, straight)


def fill_disk(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, is_full: Callable[[int], bool]
) -> None:
    """``owner.name`` finds no space at the calls whose number ``is_full``, counted from 0."""
    real, calls = getattr(owner, name), count()

    def write(*arguments: Any, **named: Any) -> Any:
        if is_full(next(calls)):
            raise OSError(28, "No space left on device")
        return real(*arguments, **named)

    monkeypatch.setattr(owner, name, write)


def test_a_checkpoint_is_retried_once_and_the_run_continues_without_it(
    tmp_path: Path,
    model_dir: Path,
    batches: list[MicroBatch],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    fill_disk(monkeypatch, checkpoint, "write_shard", lambda call: call != 1)
    trainer = make_trainer(model_dir)
    run(trainer, tmp_path, model_dir, batches[:4], ckpt=CkptConfig(interval=2))
    assert whole_steps(tmp_path) == [2]  # 2 at the second attempt; 4 never: 2 is still there
    assert "cannot write the checkpoint of step 2, next attempt in 0 s" in caplog.text
    assert "No space left on device" in caplog.text
    assert "step 4: no checkpoint" in caplog.text
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_2"]
    restore(make_trainer(finished(tmp_path, 2).weights), finished(tmp_path, 2))


@pytest.mark.parametrize("fails_at", ["complete", "link_or_copy"])
def test_the_first_and_the_last_write_of_a_checkpoint_are_retried(
    fails_at: str,
    tmp_path: Path,
    model_dir: Path,
    batches: list[MicroBatch],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    fill_disk(monkeypatch, checkpoint, fails_at, lambda call: call == 0)
    trainer = make_trainer(model_dir)
    run(trainer, tmp_path, model_dir, batches[:2], ckpt=CkptConfig(interval=2))
    assert "No space left on device" in caplog.text
    assert whole_steps(tmp_path) == [2]
    saved = finished(tmp_path, 2)
    assert same(make_trainer(saved.weights), trainer)
    assert not (saved.directory / ".published").exists()


def test_a_checkpoint_in_the_background_is_completed_when_the_trainer_fails(
    tmp_path: Path, model_dir: Path, batches: list[MicroBatch], proceed: threading.Event
) -> None:
    unfinished(tmp_path, 2).orchestrator.mkdir(parents=True)
    unfinished(tmp_path, 2).progress.write_text("{}")
    checkpointer = Checkpointer(tmp_path, CkptConfig(interval=2), model_dir, None)
    frames = Frames(1, [[batch] for batch in batches[:2]])
    with pytest.raises(IndexError) as caught:  # there is no third batch
        train(make_trainer(model_dir), frames, tmp_path, 1, Status(None), checkpointer)
    threading.Timer(0.05, proceed.set).start()
    checkpointer.rescue(caught.value)
    assert whole_steps(tmp_path) == [2]


def test_a_write_that_fails_is_repeated_once_and_the_status_names_the_disk(
    caplog: pytest.LogCaptureFixture,
) -> None:
    attempts, status = iter([True, False]), Status(None)

    def write() -> None:
        if next(attempts):
            raise WeightsError("disk full")

    published.retry(write, "publish weights version 3", status)
    assert status.last.waiting_for == "disk (disk full)"
    assert "cannot publish weights version 3, next attempt in 0 s: disk full" in caplog.text
    attempts = iter([True, True])
    with pytest.raises(WeightsError, match="disk full"):
        published.retry(write, "publish", status)


def test_the_mark_of_a_version_is_written_again_after_a_full_disk(
    tmp_path: Path,
    model_dir: Path,
    batches: list[MicroBatch],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    touch, refusals = Path.touch, [OSError(28, "No space left on device")]

    def full_touch(path: Path) -> None:
        if path.name == "STABLE" and refusals:
            raise refusals.pop()
        touch(path)

    monkeypatch.setattr(Path, "touch", full_touch)
    run(make_trainer(model_dir), tmp_path, model_dir, batches[:2])
    assert (tmp_path / "broadcasts/step_1/STABLE").exists()
    assert "cannot announce weights version 1, next attempt" in caplog.text


def test_without_the_orchestrators_part_there_is_no_checkpoint(
    tmp_path: Path,
    model_dir: Path,
    batches: list[MicroBatch],
    caplog: pytest.LogCaptureFixture,
) -> None:
    trainer = make_trainer(model_dir, max_steps=2)
    config = CkptConfig(interval=1)
    unfinished(tmp_path, 1).orchestrator.mkdir(parents=True)
    checkpointer = Checkpointer(tmp_path, config, model_dir, None)
    frames = Frames(1, [[batch] for batch in batches[:2]])
    train(trainer, frames, tmp_path, 1, Status(None), checkpointer)
    assert whole_steps(tmp_path) == []
    assert "step 1: no checkpoint: the orchestrator's part is not in" in caplog.text
    assert list((tmp_path / "checkpoints").glob("*")) == []


def test_a_look_that_the_disk_refuses_leaves_out_no_checkpoint_that_was_begun(
    tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpointer = Checkpointer(tmp_path, CkptConfig(), model_dir, None)
    part = unfinished(tmp_path, 3)
    part.orchestrator.mkdir(parents=True)
    part.progress.write_text("{}")
    disk = SharedDisk(monkeypatch, tmp_path)
    with disk.refusing(0.5):
        for step in (3, 4) * 5:
            assert checkpointer.is_due(step, 9) == (step == 3)
    assert disk.refused > 1

    refused = disk.refused
    with disk.refusing(0.5):
        for _ in range(5):
            checkpointer._check_orchestrators_part(3)
            with pytest.raises(FileNotFoundError, match="the orchestrator's part is not in"):
                checkpointer._check_orchestrators_part(4)
    assert disk.refused > refused


def test_a_version_whose_files_the_disk_refuses_to_show_has_no_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = Publisher(tmp_path, 2)
    publisher.path(1).mkdir()
    (publisher.path(1) / "model.safetensors").write_bytes(b"x" * 2**20)
    disk = SharedDisk(monkeypatch, tmp_path)
    with disk.refusing():
        assert publisher.size(1) == 0.0
    assert publisher.size(1) == 1.0


def test_a_checkpoint_of_another_shape_is_refused_by_name(
    tmp_path: Path,
    model_dir: Path,
    batches: list[MicroBatch],
    make_model: Callable[..., PreTrainedModel],
) -> None:
    run(make_trainer(model_dir), tmp_path, model_dir, batches[:1], ckpt=CkptConfig(interval=1))
    wider = tmp_path / "wider"
    make_model(hidden_size=16).float().save_pretrained(wider)
    with pytest.raises(
        ConfigError, match=r"--resume: .*of this model and optimizer: ValueError: Size mis"
    ):
        restore(make_trainer(wider), finished(tmp_path, 1))


def test_a_checkpoint_keeps_its_weights_when_the_broadcast_is_gone(
    tmp_path: Path, model_dir: Path, batches: list[MicroBatch]
) -> None:
    trainer = make_trainer(model_dir)
    run(trainer, tmp_path, model_dir, batches, ckpt=CkptConfig(interval=1, keep_last=3))
    assert whole_steps(tmp_path) == [4, 5, 6]
    assert sorted(p.name for p in (tmp_path / "broadcasts").iterdir()) == ["step_5", "step_6"]
    assert (finished(tmp_path, 4).weights / "tokenizer.json").exists()
    last = make_trainer(finished(tmp_path, 6).weights)
    assert same(last, trainer) and make_trainer(finished(tmp_path, 4).weights)


def test_the_warm_up_that_a_short_run_shortened_is_whole_again_with_more_steps(
    model_dir: Path,
) -> None:
    """Of 8 steps of warm-up, a run of 2 steps has one, and one of 20 steps all."""
    table = {"type": "constant", "warmup_steps": 8}
    short = make_trainer(model_dir, lr=1.0, max_steps=2, scheduler=table)
    long = make_trainer(model_dir, lr=1.0, max_steps=20, scheduler=short.config.scheduler)
    assert short.learning_rate(2) == 1.0
    assert [long.learning_rate(step) for step in (1, 4, 8, 9)] == [1 / 8, 1 / 2, 1, 1]
