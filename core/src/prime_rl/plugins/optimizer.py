"""Optimizers of the policy. Entry-point group ``prime_rl.trainer``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, PositiveFloat

from prime_rl.plugins.base import Offer, PluginConfig

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer


class OptimizerMaker(Offer):
    """Makes the policy's optimizer. ``trainer.optim.type`` selects it by name. Keep ``import
    torch`` inside the methods."""

    def make(self, model: nn.Module, lr: float, weight_decay: float) -> Optimizer:
        """The optimizer of the parameters that require a gradient, which may be shards
        (``DTensor``). Core sets the ``lr`` of its groups before each step. The decay is decoupled:
        a step subtracts ``lr * weight_decay * weights``."""
        raise NotImplementedError

    def resumes(self, before: Mapping[str, Any]) -> bool:
        """Whether it can continue from a checkpoint whose table ``[trainer.optim]`` was
        ``before``."""
        return bool(before["type"] == self.name)


class AdamWConfig(PluginConfig):
    """AdamW's keys of ``[trainer.optim]``."""

    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay of the gradient's running mean."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """Decay of the squared gradient's running mean."""
    eps: PositiveFloat = 1e-8
    """Added to the root of the squared gradient's mean."""


class AdamWMaker(OptimizerMaker):
    """``[trainer.optim] type = "adamw"``: core's own, made by ``trainer/optim.py``."""

    name = "adamw"
    config_class = AdamWConfig
