"""AdamW, clipping, and the learning rate over steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from prime_rl.config.trainer import OptimConfig, SchedulerConfig


def make_optimizer(parameters: Iterable[nn.Parameter], config: OptimConfig) -> torch.optim.AdamW:
    """AdamW over the parameters that train, in its fused form."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    return torch.optim.AdamW(
        trained,
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=True,
    )


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
