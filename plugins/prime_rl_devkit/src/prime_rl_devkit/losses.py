"""Conformance checks of losses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

from prime_rl import Loss, LossInputs, LossOutputs, PluginConfig, TokenMetric
from prime_rl.registry.components import Component
from prime_rl_devkit.algorithms.gradient import loss_probe
from prime_rl_devkit.verdicts import Broken, NotApplicable

WITH_GRADIENT = ("trainer_logprobs", "entropies", "top_logprobs")
"""The columns of a loss that carry one."""


def sums_over_the_mask(cls: type[Loss], config: PluginConfig) -> None:
    """It gives a 0-dim tensor whose gradient is finite, and zero off the mask."""
    need_torch()
    import torch

    inputs = _loss_inputs(cls, config)
    outputs = cls(config)(inputs)
    if not isinstance(outputs, LossOutputs) or outputs.loss.dim():
        raise Broken(f"got {outputs!r}, expected LossOutputs with a 0-dim loss")
    for name, value in outputs.metrics.items():
        if not isinstance(value, torch.Tensor | TokenMetric):
            raise Broken(f"the metric {name!r} is {value!r}, expected a tensor or a TokenMetric")
    loss: Any = outputs.loss
    _need_gradient(inputs, loss)
    loss.backward()
    leaves: list[Any] = [getattr(inputs, name) for name in WITH_GRADIENT]
    gradients = [leaf.grad for leaf in leaves if leaf is not None and leaf.grad is not None]
    if not gradients or not all(torch.isfinite(each).all() for each in gradients):
        raise Broken(f"the gradient is {gradients or None}, expected finite numbers")
    for gradient in gradients:
        if gradient[~inputs.loss_mask].any():
            raise Broken(
                f"the gradient is {gradient.tolist()} under the mask {inputs.loss_mask.tolist()}: "
                "expected 0.0 off the mask. Use torch.where(inputs.loss_mask, ..., 0.0)."
            )


def is_a_sum(cls: type[Loss], config: PluginConfig) -> None:
    """It is summed, not averaged: twice the tokens give twice the loss. With a scope beyond
    ``token``, only that the two losses differ."""
    need_torch()
    if cls.normalize_by != "tokens":
        raise NotApplicable("it is no sum over tokens")
    problem = loss_probe().mean_of(cls, cls(config))
    if problem:
        raise Broken(problem)


def weighs_each_term(cls: type[Loss], config: PluginConfig) -> None:
    """Each term is multiplied by its ``loss_weights``: twice the weights give twice the loss."""
    need_torch()
    inputs = _loss_inputs(cls, config)
    assert inputs.loss_weights is not None
    heavy = replace(inputs, loss_weights=2 * inputs.loss_weights)
    once, twice = (cls(config)(each).loss.item() for each in (inputs, heavy))
    if abs(twice - 2 * once) > 1e-4 * max(1.0, abs(once)):
        raise Broken(
            f"the loss is {once:.6g}, and {twice:.6g} with twice the loss_weights, expected "
            f"{2 * once:.6g}. A run that averages each sequence's tokens does so by these weights."
        )


def keeps_to_its_scope(cls: type[Loss], config: PluginConfig) -> None:
    """With ``scope = "token"``, a token's gradient depends on that token alone, in every column."""
    need_torch()
    if Component(cls.name, cls).scope != "token":
        raise NotApplicable("its scope is not 'token'")
    _need_gradient(inputs := _loss_inputs(cls, config), cls(config)(inputs).loss)
    problem = loss_probe().leak_of(cls, cls(config))
    if problem:
        raise Broken(problem)


def reads_what_it_declares(cls: type[Loss], config: PluginConfig) -> None:
    """It works with what ``reads`` declares, optional streams absent, and with nothing else; and
    without the sampler's logprobs if it does not compare with them."""
    need_torch()
    import torch

    component = Component(cls.name, cls)
    inputs = _loss_inputs(cls, config)
    absent = {name for name, default in component.defaults.items() if default is None}
    streams = {n: None if n in absent else column for n, column in inputs.streams.items()}
    less = replace(inputs, streams=streams)
    if "ref_logprobs" in absent:
        less = replace(less, ref_logprobs=None)
    if not cls.compares_with_sampler:
        less = replace(less, inference_logprobs=torch.full((6,), torch.nan))
    loss = cls(config)(less).loss
    if not torch.isfinite(loss):
        raise Broken(
            f"the loss is {loss.item()} where what it does not declare is NaN. Name every column "
            "in reads; set compares_with_sampler = True to read inference_logprobs."
        )


def need_torch() -> None:
    if find_spec("torch") is None:
        raise NotApplicable("torch is not installed")


def _need_gradient(inputs: LossInputs, loss: Any) -> None:
    """A loss may train a head alone: then a stream carries the gradient."""
    import torch

    if not loss.requires_grad:
        raise Broken(
            "the loss has no gradient: it would train nothing. Use inputs.trainer_logprobs, "
            "without detach()."
        )

    leaves = [leaf for name in WITH_GRADIENT if (leaf := getattr(inputs, name)) is not None]
    gradients = torch.autograd.grad(loss, leaves, retain_graph=True, allow_unused=True)
    if all(each is None for each in gradients):
        raise NotApplicable("the loss does not depend on log π")


def _loss_inputs(cls: type[Loss], config: PluginConfig) -> LossInputs:
    probe = loss_probe()
    shape = probe.fitting_shape(cls, cls(config))
    inputs: LossInputs = probe.probe_inputs(cls, vectors=shape)
    return inputs


CHECKS: tuple[Callable[[type[Any], PluginConfig], None], ...] = (
    *(sums_over_the_mask, is_a_sum, weighs_each_term),
    *(keeps_to_its_scope, reads_what_it_declares),
)
