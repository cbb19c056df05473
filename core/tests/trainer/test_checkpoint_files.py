"""What the trainer reads: checkpoints of tensors only, which run no code, and tokens that exist."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_training import PolicyGradient

from prime_rl import ConfigError, PluginConfig, StreamError
from prime_rl.config.trainer import TrainerConfig
from prime_rl.registry.components import installed_losses
from prime_rl.rundir.checkpoints import Checkpoint
from prime_rl.trainer.checkpoint import restore, snapshot, write_shard
from prime_rl.trainer.loop import Trainer
from prime_rl.trainer.model import load_model


class Malicious:
    """Unpickling this creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, ...]]:
        return exec, (f"open({str(self.path)!r}, 'w').close()",)


@pytest.fixture
def trainer(model_dir: Path) -> Trainer:
    config = TrainerConfig.model_validate({"device": "cpu"})
    losses = installed_losses().with_rl(PolicyGradient(PluginConfig()))
    return Trainer(load_model(model_dir, config), losses, config, 2)


@pytest.mark.parametrize("file", [".metadata", "rank_0.safetensors", "rank_1.safetensors"])
def test_a_pickle_in_a_checkpoint_is_refused_and_not_unpickled(
    tmp_path: Path, trainer: Trainer, file: str
) -> None:
    mark = tmp_path / "code has run"
    bomb = pickle.dumps(Malicious(mark))
    pickle.loads(bomb)
    assert mark.exists()  # the bomb works
    mark.unlink()
    checkpoint = Checkpoint(tmp_path / "step_1")
    checkpoint.trainer.mkdir(parents=True)
    write_shard(checkpoint.trainer, snapshot(trainer, 1))
    assert [path.name for path in checkpoint.trainer.iterdir()] == ["rank_0.safetensors"]
    restore(trainer, checkpoint)
    (checkpoint.trainer / file).write_bytes(bomb)
    with pytest.raises(ConfigError, match=rf"--resume: {checkpoint.trainer} (is of an|does not)"):
        restore(trainer, checkpoint)
    assert not mark.exists()


@pytest.mark.parametrize("token", [-1, 10**6])
def test_a_token_outside_of_the_vocabulary_is_named(
    trainer: Trainer, pack: Any, token: int
) -> None:
    batch = pack([[1, 2, 3]], prompt=1)
    batch.token_ids = np.asarray([1, token, 3], np.int32)
    with pytest.raises(StreamError, match=rf"token {token}, expected 0 to \d+, the policy's vocab"):
        trainer.train_step(1, [batch])
