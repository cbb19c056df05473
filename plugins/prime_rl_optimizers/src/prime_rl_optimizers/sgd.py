"""Stochastic gradient descent, and its variant that steps along signs."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from prime_rl_optimizers.makers import SgdConfig


def sgd(model: nn.Module, config: SgdConfig, lr: float, weight_decay: float) -> torch.optim.SGD:
    """torch's, whose own weight decay would enter the momentum; ours is decoupled."""
    optimizer = torch.optim.SGD(
        [parameter for parameter in model.parameters() if parameter.requires_grad],
        lr=lr,
        momentum=config.momentum,
        nesterov=config.nesterov,
        foreach=True,
    )

    def decay(*_: object) -> None:
        for group in optimizer.param_groups:
            trained = [each for each in group["params"] if each.grad is not None]
            if trained:
                with torch.no_grad():
                    torch._foreach_mul_(trained, 1 - group["lr"] * weight_decay)

    optimizer.register_step_pre_hook(decay)
    return optimizer


class SignSGD(Optimizer):
    """w <- w - lr * (sign(g) + weight_decay * w); no state.

    Bernstein et al. 2018, arXiv:1802.04434, Algorithm 1, with decoupled weight decay.
    """

    def __init__(
        self, parameters: list[nn.Parameter], lr: float, weight_decay: float = 0.0
    ) -> None:
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One step along the signs."""
        for group in self.param_groups:
            trained = [each for each in group["params"] if each.grad is not None]
            if trained:
                signs = torch._foreach_sign([each.grad for each in trained])
                torch._foreach_mul_(trained, 1 - group["lr"] * group["weight_decay"])
                torch._foreach_add_(trained, signs, alpha=-group["lr"])
