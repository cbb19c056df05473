"""What the trainer's process hands on from its config and launch, without a process."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from prime_rl.config.run import RunConfig
from prime_rl.rundir.launch import Launch
from prime_rl.rundir.status import Status
from prime_rl.trainer import __main__ as process
from prime_rl.trainer.rank import Rank


class Parts:
    """Stand-ins for what ``train_here`` builds; ``calls`` has their order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, failure: Exception | None = None) -> None:
        self.calls: list[Any] = []
        self.trained: dict[str, Any] = {}
        self.trainer = SimpleNamespace(device="cpu", dtype="float32")
        receiver = SimpleNamespace(close=lambda: self.calls.append("close"))

        def train(trainer: Any, receiver: Any, run_dir: Path, **named: Any) -> None:
            self.calls.append("train")
            self.trained = named
            if failure is not None:
                raise failure

        def checkpointer(run_dir: Path, config: Any, model_path: Path, resumed: Any) -> Any:
            self.calls.append(("checkpointer", resumed))
            return SimpleNamespace(rescue=lambda error: self.calls.append(("rescue", error)))

        def note(name: str) -> Any:
            return lambda *arguments, **named: self.calls.append(name)

        def publish_earlier(
            trainer: Any, run_dir: Path, step: int, status: Status, resumed: bool
        ) -> None:
            assert trainer.publishes_average and not trainer.publishes_reference and resumed
            self.calls.append(("average", step))

        for name, part in {
            "model.load_model": lambda *arguments, **named: SimpleNamespace(config=None),
            "model.check_positions": note("positions"),
            "loop.Trainer": lambda *arguments, **named: self.trainer,
            "loop.train": train,
            "loop.finish": note("finish"),
            "loop.publish_earlier": publish_earlier,
            "checkpoint.Checkpointer": checkpointer,
            "checkpoint.restore": note("restore"),
        }.items():
            monkeypatch.setattr(f"prime_rl.trainer.{name}", part)
        monkeypatch.setattr(
            "prime_rl.wire.transport.make_receiver", lambda launch, run_dir, rank: receiver
        )

    def run(self, tmp_path: Path, checkpoint: Any = None, **reference_urls: str) -> None:
        launch: Any = SimpleNamespace(
            adapter=None,
            initial=tmp_path,
            reference_urls=reference_urls,
            checkpoint=checkpoint,
            first_step=5,
        )
        config: Any = SimpleNamespace(
            deployment=SimpleNamespace(colocated=False),
            trainer=None,
            seq_len=8,
            max_steps=9,
            ckpt=None,
            has_engines=False,
        )
        parts: Any = None
        process.train_here(
            config,
            launch,
            losses=parts,
            observers=[],
            tuning=None,
            kernel=parts,
            maker=parts,
            transport=None,
            model_path=tmp_path,
            run_dir=tmp_path,
            status=Status(None),
        )


def test_a_resumed_trainer_restores_and_publishes_its_average_before_it_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = Parts(monkeypatch)
    parts.run(tmp_path, checkpoint=SimpleNamespace(directory=tmp_path, step=4), ema="http://e:1")
    assert parts.calls == [
        "positions",
        "restore",
        ("average", 4),
        ("checkpointer", 4),
        "train",
        "close",
        "finish",
    ]
    assert parts.trained["first_step"] == 5 and parts.trained["has_engines"] is False


def test_a_new_trainer_restores_nothing_and_has_no_average_to_publish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = Parts(monkeypatch)
    parts.run(tmp_path, initial="http://i:1")
    assert parts.calls == ["positions", ("checkpointer", None), "train", "close", "finish"]
    assert not parts.trainer.publishes_average and parts.trainer.publishes_reference


def test_a_trainer_that_fails_rescues_its_checkpoint_and_exports_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failure = ValueError("out of memory")
    parts = Parts(monkeypatch, failure)
    with pytest.raises(ValueError, match="out of memory"):
        parts.run(tmp_path)
    assert parts.calls[-3:] == ["train", ("rescue", failure), "close"]


def test_the_runs_seed_is_the_trainers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("configs", "status", "model"):
        (tmp_path / name).mkdir()
    table = {"model": {"name": "m"}, "max_steps": 1, "seed": 11}
    config = RunConfig.model_validate(
        table | {"trainer": {"device": "cpu", "loss": {"type": "plain"}}}
    )
    (tmp_path / "configs/run.json").write_text(config.model_dump_json())
    Launch(
        model_path=str(tmp_path / "model"),
        served_model_name="m",
        engine_urls=[],
        transport_type="zmq",
        transport_host="",
        transport_ports=[],
    ).write(tmp_path)
    seeds: list[int] = []
    monkeypatch.setattr(
        process, "train_here", lambda *arguments, **named: seeds.append(torch.initial_seed())
    )
    before = torch.get_rng_state()
    try:
        process.run(tmp_path, Status(None), Rank())
    finally:
        torch.set_rng_state(before)
    assert seeds == [11]
