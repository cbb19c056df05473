"""Optimizers, clipping, and the learning rate over steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from prime_rl.config.trainer import OptimConfig, SchedulerConfig
from prime_rl.trainer.muon import Muon


def make_optimizer(model: nn.Module, config: OptimConfig) -> Optimizer:
    """The optimizer of the parameters that train, in its fastest form."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if config.type == "muon":
        matrices = hidden_matrices(model)
        inside = set(map(id, matrices))
        return Muon(matrices, [each for each in trained if id(each) not in inside], config)
    if config.type == "sgd":
        return _sgd(trained, config)
    if config.type == "sign_sgd":
        return SignSGD(trained, config.lr, config.weight_decay)
    return torch.optim.AdamW(
        trained,
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=True,
    )


def hidden_matrices(model: nn.Module) -> list[nn.Parameter]:
    """The trained matrices between embeddings and LM head."""
    ends = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    find_head = getattr(model, "get_output_embeddings", lambda: None)
    ends += [] if (head := find_head()) is None else [head]
    outside = {id(parameter) for module in ends for parameter in module.parameters()}
    return [
        parameter
        for parameter in model.parameters()
        if parameter.requires_grad and parameter.dim() == 2 and id(parameter) not in outside
    ]


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


def _sgd(trained: list[nn.Parameter], config: OptimConfig) -> torch.optim.SGD:
    """torch's, whose own weight decay would enter the momentum; ours is decoupled."""
    optimizer = torch.optim.SGD(
        trained,
        lr=config.lr,
        momentum=config.momentum or 0.0,
        nesterov=bool(config.nesterov),
        foreach=True,
    )

    def decay(*_: object) -> None:
        for group in optimizer.param_groups:
            with torch.no_grad():
                torch._foreach_mul_(group["params"], 1 - group["lr"] * config.weight_decay)

    optimizer.register_step_pre_hook(decay)
    return optimizer


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float | None) -> Tensor:
    """Scale all gradients to a global norm of at most ``max_norm``; their norm before, 0-dim."""
    bound = math.inf if max_norm is None else max_norm
    return torch.nn.utils.clip_grad_norm_(list(parameters), bound, foreach=True)


def make_schedule(config: SchedulerConfig, peak: float, max_steps: int) -> Callable[[int], float]:
    """The learning rate of step n = 1 .. ``max_steps``; W = warm-up steps, D = decay steps::

        warm-up  n <= W          peak * n / W                      (the first step already learns)
        hold                     peak
        decay    last D steps    from peak, reaching min_lr after the last step (which still learns)

    ``linear`` decays on a line, ``cosine`` on half a wave over everything after warm-up. Raises
    ``ConfigError`` if warm-up and decay do not fit into the run or ``min_lr`` lies above ``lr``.
    """
    config.check(peak, max_steps)
    warmup, decay = config.warmup_steps, config.num_decay_steps(max_steps)

    def learning_rate(step: int) -> float:
        if step <= warmup:
            return peak * step / warmup
        done = step - 1 - (max_steps - decay)
        if done <= 0:
            return peak
        share = done / decay
        if config.type == "cosine":
            share = (1 - math.cos(math.pi * share)) / 2
        return peak + (config.min_lr - peak) * share

    return learning_rate
