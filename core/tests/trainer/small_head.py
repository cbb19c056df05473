"""A head for trainings of a few steps, and the loss that trains it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from prime_rl import Head, HeadInputs, Loss, LossInputs, LossOutputs, PluginConfig, TokenMetric
from prime_rl.config.trainer import LossTable
from prime_rl.registry.components import Components, installed_losses
from prime_rl.registry.offers import Offered


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
        from torch import nn

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
