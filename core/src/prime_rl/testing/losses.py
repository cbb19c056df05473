"""Checks of a loss of the rl component, where torch is. This and ``gradient`` are the kit's only
modules that import it."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from prime_rl.plugins.base import PluginConfig
from prime_rl.plugins.loss import Loss, LossInputs, LossOutputs
from prime_rl.testing.report import Broken, NotApplicable


def sums_over_the_mask(cls: type[Loss], config: PluginConfig) -> None:
    """It gives a 0-dim tensor whose gradient is finite, and zero off the mask."""
    _need_torch()
    import torch

    inputs = _loss_inputs()
    outputs = cls(config)(inputs)
    if not isinstance(outputs, LossOutputs) or outputs.loss.dim():
        raise Broken(f"got {outputs!r}, expected LossOutputs with a 0-dim loss")
    loss: Any = outputs.loss
    loss.backward()
    gradient = inputs.trainer_logprobs.grad
    if gradient is None or not torch.isfinite(gradient).all():
        raise Broken(f"the gradient is {gradient}, expected finite numbers")
    if gradient[~inputs.loss_mask].any():
        raise Broken(
            f"the gradient is {gradient.tolist()} under the mask {inputs.loss_mask.tolist()}: "
            "expected 0.0 off the mask. Use torch.where(inputs.loss_mask, ..., 0.0)."
        )


def is_a_sum(cls: type[Loss], config: PluginConfig) -> None:
    """It is summed, not averaged: two copies of a sequence give twice the loss."""
    _need_torch()
    import torch

    one = _loss_inputs()
    if not cls.token_wise:
        raise NotApplicable("token_wise is False, so it is called once a sequence")
    columns = {name: torch.cat([value, value]) for name, value in vars(one).items()}
    once, twice = (cls(config)(each).loss.item() for each in (one, LossInputs(**columns)))
    if abs(twice - 2 * once) > 1e-4 * max(1.0, abs(once)):
        raise Broken(
            f"one copy gives {once:.6g}, two give {twice:.6g}, expected {2 * once:.6g}. Return "
            "the sum; the trainer divides by the global count of member tokens."
        )


def _need_torch() -> None:
    if find_spec("torch") is None:
        raise NotApplicable("torch is not installed")


def _loss_inputs() -> LossInputs:
    """Six tokens, the last off the mask; on the policy, above and below it."""
    import torch

    return LossInputs(
        trainer_logprobs=torch.tensor([0.9, 0.1, 0.5, 0.5, 0.3, 0.05]).log().requires_grad_(),
        inference_logprobs=torch.tensor([0.6, 0.4, 0.5, 0.2, 0.55, 0.06]).log(),
        ref_logprobs=torch.tensor([0.8, 0.2, 0.7, 0.4, 0.3, 0.9]).log(),
        advantages=torch.tensor([1.0, -1.0, 0.5, -0.5, 0.0, 2.0]),
        loss_mask=torch.tensor([True, True, True, True, True, False]),
        loss_weights=torch.tensor([1.0, 1.0, 0.5, 0.5, 2.0, 1.0]),
    )
