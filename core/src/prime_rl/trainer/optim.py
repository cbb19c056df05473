"""The optimizer, clipping of gradients, and the learning rate over steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from prime_rl.config.trainer import SchedulerConfig
from prime_rl.plugins.base import PluginConfig
from prime_rl.plugins.trainer import AdamWConfig, AdamWMaker, OptimizerMaker


def build_optimizer(
    maker: OptimizerMaker, model: nn.Module, lr: float, weight_decay: float
) -> Optimizer:
    """The policy's optimizer. The contract imports no torch, so core's own is made here."""
    if not isinstance(maker, AdamWMaker):
        return maker.make(model, lr, weight_decay)

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return adamw(trained, maker.config, lr=lr, weight_decay=weight_decay)


def adamw(parameters: list[Any], config: PluginConfig, lr: float, weight_decay: float) -> AdamW:
    """AdamW in its fastest form, with the settings of ``config`` if it has them, else the
    defaults."""
    known = config if isinstance(config, AdamWConfig) else AdamWConfig()
    betas = (known.beta1, known.beta2)
    return AdamW(
        parameters, lr=lr, betas=betas, eps=known.eps, weight_decay=weight_decay, fused=True
    )


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float | None) -> Tensor:
    """Scale all gradients to a global norm of at most ``max_norm``; their norm before, 0-dim."""
    # Without a bound nothing is scaled, and the norm is still measured.
    return torch.nn.utils.clip_grad_norm_(list(parameters), max_norm or math.inf, foreach=True)


def make_schedule(config: SchedulerConfig, peak: float, max_steps: int) -> Callable[[int], float]:
    """The learning rate of step n = 1 .. ``max_steps``; W = warm-up steps, D = decay steps::

        warm-up  n <= W          peak * n / W                     (the first step already learns)
        constant                 peak
        decay    last D steps    from peak to min_lr after the last step (which still learns)

    ``linear`` decays on a line, ``cosine`` on half a wave over everything after warm-up. Raises
    ``ConfigError`` if warm-up and decay do not fit into the run or ``min_lr`` lies above ``lr``.
    """
    config.check(peak, max_steps)
    warmup = config.warmup_steps
    decay = config.num_decay_steps(max_steps)

    def learning_rate(step: int) -> float:
        if step <= warmup:
            return peak * step / warmup
        # 0 at the first step of the decay: the last step then lies above min_lr, and learns.
        done = step - 1 - (max_steps - decay)
        if done <= 0:
            return peak

        share = done / decay
        if config.type == "cosine":
            share = (1 - math.cos(math.pi * share)) / 2
        return peak + (config.min_lr - peak) * share

    return learning_rate
