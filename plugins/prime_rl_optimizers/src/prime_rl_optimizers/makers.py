"""The optimizers' settings, and when a checkpoint has the state that they need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, model_validator

from prime_rl import AdamWConfig, ConfigError, OptimizerMaker, PluginConfig

if TYPE_CHECKING:
    import numpy as np
    from torch import nn
    from torch.optim import Optimizer


class MuonConfig(AdamWConfig):
    """Keys of Muon, and of the AdamW beside it."""

    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Decay of the sum of gradients."""
    nesterov: bool = True
    """Nesterov momentum."""
    ns_steps: Annotated[int, Field(ge=1, lt=100)] = 5
    """Newton-Schulz iterations that make an update orthogonal."""


class MuonMaker(OptimizerMaker):
    """Makes the updates of the blocks' matrices orthogonal, at AdamW's scale, so both use one
    learning rate; embeddings, head, norms and biases get AdamW."""

    name = "muon"
    config_class = MuonConfig
    config: MuonConfig

    def make(self, model: nn.Module, lr: float, weight_decay: float) -> Optimizer:
        from prime_rl_optimizers.muon import Muon, split

        return Muon(*split(model), self.config, lr, weight_decay)


class OffloadedAdamWMaker(OptimizerMaker):
    """AdamW with its moments in host memory: 8 bytes per weight on the GPU instead of 16, for 16
    bytes per weight over PCIe in each step."""

    name = "adamw_offload"
    config_class = AdamWConfig
    config: AdamWConfig

    def make(self, model: nn.Module, lr: float, weight_decay: float) -> Optimizer:
        from prime_rl_optimizers.offload import OffloadedAdamW

        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return OffloadedAdamW(trained, self.config, lr=lr, decay=weight_decay)

    def resumes(self, before: Mapping[str, Any]) -> bool:
        """AdamW has the same state."""
        return before["type"] in ("adamw", "pcgrad", self.name)


class PCGradMaker(OptimizerMaker):
    """AdamW on the sum of the envs' gradients, of which none keeps what conflicts with another
    (``pcgrad.py``)."""

    name = "pcgrad"
    config_class = AdamWConfig
    config: AdamWConfig
    weighs_envs = True

    def make(self, model: nn.Module, lr: float, weight_decay: float) -> Optimizer:
        import torch

        return torch.optim.AdamW(
            [parameter for parameter in model.parameters() if parameter.requires_grad],
            lr=lr,
            betas=(self.config.beta1, self.config.beta2),
            eps=self.config.eps,
            weight_decay=weight_decay,
            fused=True,
        )

    def env_weights(self, step: int, envs: Sequence[str], products: np.ndarray) -> list[float]:
        from prime_rl_optimizers.pcgrad import weights_of

        return weights_of(products, step)

    def resumes(self, before: Mapping[str, Any]) -> bool:
        """AdamW has the same state."""
        return before["type"] in ("adamw", "adamw_offload", self.name)


class SgdConfig(PluginConfig):
    """Keys of stochastic gradient descent."""

    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Decay of the sum of gradients. 0: no state is kept."""
    nesterov: bool = False
    """Nesterov momentum."""

    @model_validator(mode="after")
    def _nesterov_has_momentum(self) -> SgdConfig:
        if self.nesterov and not self.momentum:
            raise ConfigError("nesterov needs a momentum above 0. Set momentum, 0.9 for example.")
        return self


class SgdMaker(OptimizerMaker):
    """Stochastic gradient descent with decoupled weight decay."""

    name = "sgd"
    config_class = SgdConfig
    config: SgdConfig

    def make(self, model: nn.Module, lr: float, weight_decay: float) -> Optimizer:
        from prime_rl_optimizers.sgd import sgd

        return sgd(model, self.config, lr=lr, weight_decay=weight_decay)

    def resumes(self, before: Mapping[str, Any]) -> bool:
        """A momentum may be dropped, and not be gained."""
        return super().resumes(before) and bool(before.get("momentum") or not self.config.momentum)


class SignSgdMaker(OptimizerMaker):
    """Steps along the signs of the gradient, and keeps no state."""

    name = "sign_sgd"

    def make(self, model: nn.Module, lr: float, weight_decay: float) -> Optimizer:
        from prime_rl_optimizers.sgd import SignSGD

        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return SignSGD(trained, lr, weight_decay)

    def resumes(self, before: Mapping[str, Any]) -> bool:
        return True
