"""Conformance checks of losses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

from prime_rl import Loss, LossInputs, LossOutputs, PluginConfig
from prime_rl.registry.components import Component
from prime_rl.streams import TOP_IDS
from prime_rl_devkit.verdicts import Broken, NotApplicable

WITH_GRADIENT = ("trainer_logprobs", "entropies", "top_logprobs")
"""The columns of a loss that carry one."""


def sums_over_the_mask(cls: type[Loss], config: PluginConfig) -> None:
    """It gives a 0-dim tensor whose gradient is finite, and zero off the mask."""
    need_torch()
    import torch

    inputs = _loss_inputs(cls)
    outputs = cls(config)(inputs)
    if not isinstance(outputs, LossOutputs) or outputs.loss.dim():
        raise Broken(f"got {outputs!r}, expected LossOutputs with a 0-dim loss")
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
    ``token``: not the same."""
    need_torch()

    component = Component(cls.name, cls)
    if cls.normalize_by != "tokens":
        raise NotApplicable("it is no sum over tokens")
    once, twice = (cls(config)(_loss_inputs(cls, n)).loss.item() for n in (1, 2))
    if component.scope != "token":
        if abs(once) > 1e-6 and abs(twice - once) < 1e-4 * abs(once):
            raise Broken(
                f"6 tokens give {once:.6g}, and so do the same ones twice: it is a mean. Return "
                "the sum; the trainer divides by the global count of member tokens. For a term per "
                'sequence declare normalize_by = "sequences".'
            )
    elif abs(twice - 2 * once) > 1e-4 * max(1.0, abs(once)):
        raise Broken(
            f"one copy gives {once:.6g}, two give {twice:.6g}, expected {2 * once:.6g}. Return "
            "the sum; the trainer divides by the global count of member tokens."
        )


def weighs_each_term(cls: type[Loss], config: PluginConfig) -> None:
    """Each term is multiplied by its ``loss_weights``: twice the weights give twice the loss."""
    need_torch()
    inputs = _loss_inputs(cls)
    assert inputs.loss_weights is not None
    heavy = replace(inputs, loss_weights=2 * inputs.loss_weights)
    once, twice = (cls(config)(each).loss.item() for each in (inputs, heavy))
    if abs(twice - 2 * once) > 1e-4 * max(1.0, abs(once)):
        raise Broken(
            f"the loss is {once:.6g}, and {twice:.6g} with twice the loss_weights, expected "
            f"{2 * once:.6g}. A run that averages each sequence's tokens does so by these weights."
        )


def keeps_to_its_scope(cls: type[Loss], config: PluginConfig) -> None:
    """With ``scope = "token"``, a token's gradient depends on that token alone."""
    need_torch()
    import torch

    if Component(cls.name, cls).scope != "token":
        raise NotApplicable("its scope is not 'token'")

    def gradient(logprobs: torch.Tensor) -> torch.Tensor:
        inputs = replace(_loss_inputs(cls), trainer_logprobs=logprobs.requires_grad_())
        loss = cls(config)(inputs).loss
        _need_gradient(inputs, loss)
        torch.autograd.backward(loss)
        if logprobs.grad is None:
            raise NotApplicable("the loss does not depend on inputs.trainer_logprobs")
        return logprobs.grad

    before = _loss_inputs(cls).trainer_logprobs.detach()
    moved = before.clone()
    moved[0] -= 0.01
    changed = (gradient(before) - gradient(moved))[1:].abs().max().item()
    if changed > 1e-6:
        raise Broken(
            f"log π of token 0 changed the gradient of other tokens by {changed:.3g}. Declare the "
            "scope that one call has to see whole: 'sequence', 'rollout' or 'group'."
        )


def reads_what_it_declares(cls: type[Loss], config: PluginConfig) -> None:
    """It works with what ``reads`` declares, optional streams absent, and with nothing else; and
    without the sampler's logprobs if it does not compare with them."""
    need_torch()
    import torch

    component = Component(cls.name, cls)
    inputs = _loss_inputs(cls)
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
    found = torch.autograd.grad(loss, leaves, retain_graph=True, allow_unused=True)
    if all(each is None for each in found):
        raise NotApplicable("the loss does not depend on log π")


def _loss_inputs(cls: type[Loss], copies: int = 1) -> LossInputs:
    """Six tokens, the last off the mask; on the policy, above and below it. Streams that the loss
    reads are 0.5; those that begin with ``top_`` have log(1/4) and log(1/8) for each token."""
    import torch

    given = {
        "trainer_logprobs": torch.tensor([0.9, 0.1, 0.5, 0.5, 0.3, 0.05]).log(),
        "inference_logprobs": torch.tensor([0.6, 0.4, 0.5, 0.2, 0.55, 0.06]).log(),
        "ref_logprobs": torch.tensor([0.8, 0.2, 0.7, 0.4, 0.3, 0.9]).log(),
        "advantages": torch.tensor([1.0, -0.75, 0.5, -0.5, 0.25, 2.0]),
        "loss_mask": torch.tensor([True, True, True, True, True, False]),
        "loss_weights": torch.tensor([1.0, 1.0, 0.5, 0.5, 2.0, 1.0]),
    }
    component = Component(cls.name, cls)
    if "advantages" not in component.streams:
        given["advantages"] = torch.full((6,), torch.nan)
    given |= {name: torch.full((6,), 0.5) for name in component.computed}
    given |= {name: given[name].long() for name in component.computed if name.endswith("_ids")}
    if "top_logprobs" in given:
        given["top_logprobs"] = torch.tensor([[0.5, 0.25]] * 6).log()
    read = {
        name: torch.tensor([[0.25, 0.125]] * 6).log() if name.startswith("top_")
        else given.get(name, torch.full((6,), 0.5))
        for name in component.streams
    }  # fmt: skip
    if TOP_IDS in read:
        read[TOP_IDS] = torch.arange(12, dtype=torch.int32).view(6, 2)
    known, streams = (
        {name: torch.cat([column] * copies) for name, column in columns.items()}
        for columns in (given, read)
    )
    for name in known.keys() & set(WITH_GRADIENT):
        known[name].requires_grad_()
    for column in streams.values():
        if column.is_floating_point() and not column.requires_grad:
            column.requires_grad_()  # it may be the output of a head

    inputs = LossInputs(**known, streams=streams)
    return inputs if "ref_logprobs" in streams else replace(inputs, ref_logprobs=None)


CHECKS: tuple[Callable[[type[Any], PluginConfig], None], ...] = (
    *(sums_over_the_mask, is_a_sum, weighs_each_term),
    *(keeps_to_its_scope, reads_what_it_declares),
)
