"""A head for trainings of a few steps, and the loss that trains it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from trainer_fixtures import Ratio, kernel_of
from transformers import PreTrainedModel

from prime_rl import (
    Head,
    HeadInputs,
    Loss,
    LossInputs,
    LossOutputs,
    PluginConfig,
    Rollout,
    Sample,
    TokenMetric,
)
from prime_rl.config.trainer import LossTable, TrainerConfig
from prime_rl.orchestrator.packer import batch_frames, batch_to_pack
from prime_rl.orchestrator.scoring import stamp
from prime_rl.registry.components import Components, installed_losses
from prime_rl.registry.offers import Offered
from prime_rl.trainer.loop import Trainer
from prime_rl.wire.micro_batch import decode_batch

CAPACITY = 24
"""Tokens of a row."""


class Scores(Head):
    """A linear layer. Each token's goal is the sum of the rewards that the call sees; its advantage
    is the goal minus the score."""

    name = "scores"
    reads = ("rewards",)
    writes = ("advantages", "goals")

    def __init__(self, config: PluginConfig) -> None:
        super().__init__(config)
        self.calls: list[HeadInputs] = []

    def build(self, hidden_size: int) -> Any:

        return nn.Sequential(nn.Linear(hidden_size, 1), nn.Flatten(0))

    def prepare(self, inputs: HeadInputs) -> Mapping[str, Any]:
        self.calls.append(inputs)
        goals = np.where(inputs.loss_mask, inputs.streams["rewards"].sum(), 0.0)
        return {"goals": goals, "advantages": goals - inputs.outputs}


class Fit(Loss):
    """w (score - goal)^2 / 2"""

    name = "fit"
    token_wise = True
    reads = ("scores", "goals")
    compares_with_sampler = False

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        scores, goals = inputs.streams["scores"], inputs.streams["goals"]
        assert scores is not None and goals is not None and inputs.loss_weights is not None
        terms = (inputs.loss_weights * (scores - goals).square() / 2)[inputs.loss_mask]
        error = TokenMetric((scores - goals).detach().square(), inputs.loss_mask)
        return LossOutputs(terms.sum(), {"error": error})


def with_scores(rl: Loss, head: Head | None = None) -> Components:
    """Every installed loss, ``fit``, and one head: ``scores``."""
    installed = dict(installed_losses().installed)
    installed["fit"] = Offered(Fit, installed["ce"].source)
    heads = {"scores": head or Scores(PluginConfig())}
    return Components({"rl": LossTable()}, installed, heads).with_rl(rl)


# -- a training of it -----------------------------------------------------------------------------


def rollout_of(env: str, group: int, lengths: Sequence[int], seed: int) -> Rollout:
    """Samples of random tokens with two of prompt each."""
    rng = np.random.default_rng(seed)
    samples = [
        Sample(
            token_ids=rng.integers(1, 61, length),
            loss_mask=np.arange(length) >= 2,
            inference_logprobs=np.where(np.arange(length) >= 2, -rng.uniform(3, 5, length), 0),
        )
        for length in lengths
    ]
    return Rollout(env=env, example_id=0, group_id=group, reward=0.0, samples=samples)


def scored_rollouts(seed: int = 0) -> list[Rollout]:
    """Four that train the head, of one or two samples, and two of another env that do not."""
    rng, found = np.random.default_rng(seed), []
    for group, lengths in enumerate([[7, 5], [9], [4, 6], [8], [6], [5, 5]]):
        rollout = rollout_of("ab"[group >= 4], group, lengths, 10 * seed + group)
        if rollout.env == "a":
            rollout.assign_stream("rewards", rng.normal(size=rollout.num_trainable_tokens))
            rollout.assign_weights("fit", rng.choice([0.5, 2.0], rollout.num_trainable_tokens))
        else:
            rollout.assign_advantages(rng.normal(size=rollout.num_trainable_tokens))
        found.append(rollout)
    return found


def rows_of(rollouts: Sequence[Rollout], losses: Components, minibatches: int = 1) -> Any:
    for rollout in rollouts:
        stamp(rollout, "rl", losses)
    packing = batch_to_pack(1, rollouts, losses, CAPACITY)
    (frame,) = batch_frames(packing, CAPACITY, minibatches=minibatches)
    return decode_batch(frame)[1]


def trainer_of(
    model: PreTrainedModel, table: Mapping[str, Any], head: Scores | None = None, **more: Any
) -> Trainer:
    optim = {"lr": 0.01, "weight_decay": 0.0, "max_norm": None} | more.pop("optim", {})
    config = TrainerConfig.model_validate(
        {"device": "cpu", "optim": optim, "heads": {"scores": table}} | more
    )
    torch.manual_seed(3)
    losses = with_scores(Ratio(PluginConfig()), head)
    return Trainer(model, losses, config, 20, kernel=kernel_of(config))
