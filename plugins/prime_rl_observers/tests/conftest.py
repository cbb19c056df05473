"""Fixtures of the trainer's tests, and a trainer with observers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from trainer_fixtures import make_model as make_model
from trainer_fixtures import pack as pack
from trainer_fixtures import random_documents as random_documents
from transformers import PreTrainedModel

from prime_rl import Loss, PluginConfig
from prime_rl.config.trainer import TrainerConfig
from prime_rl.plugins.hookspecs import TRAINER_GROUP
from prime_rl.registry.components import installed_losses
from prime_rl.registry.manager import load_plugins
from prime_rl.registry.offers import make_observers
from prime_rl.trainer.loop import Trainer


@pytest.fixture
def make_trainer(
    make_model: Callable[..., PreTrainedModel], tmp_path: Path
) -> Callable[..., Trainer]:
    """A loss and the table ``[trainer]`` to a trainer with every observer, which has begun."""

    def make(loss: type[Loss], table: Mapping[str, Any]) -> Trainer:
        config = TrainerConfig.model_validate({"device": "cpu", **table})
        observers = make_observers(config.settings, load_plugins(TRAINER_GROUP))
        trainer = Trainer(
            make_model(), installed_losses().with_rl(loss(PluginConfig())), config, 20, observers
        )
        for observer in observers:
            observer.started(trainer, tmp_path)
        return trainer

    return make
