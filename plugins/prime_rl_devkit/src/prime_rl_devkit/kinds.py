"""Conformance checks of filters, losses, heads and samplers. Other kinds need a server, a file or
a model: their package's own tests check them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from prime_rl import (
    Filter,
    Head,
    HeadInputs,
    Loss,
    LossInputs,
    LossOutputs,
    PluginConfig,
    SampledEnv,
    Sampler,
)
from prime_rl.plugins.base import Offer
from prime_rl.plugins.components import Component
from prime_rl.plugins.manager import Hooks, scope
from prime_rl.streams import TOP_IDS
from prime_rl.testing import conformance_group, logged_metrics
from prime_rl.testing.report import Broken, NotApplicable, Outcome, Report, run
from prime_rl.testing.scoring import MIXED

WITH_GRADIENT = ("trainer_logprobs", "entropies", "top_logprobs")
"""The columns of a loss that carry one."""

Check = Callable[[type[Any], PluginConfig], None]


def filter_answers(cls: type[Filter], config: PluginConfig) -> None:
    """It gives a reason or None, and the same one when asked again."""
    hooks = scope("slot", Hooks(), [cls(config)])
    for rollout in conformance_group(MIXED):
        for sample in rollout.samples:
            sample.freeze()
        first, again = (hooks.hook.filter_rollout(rollout=rollout) for _ in range(2))
        for reason in first:
            if not isinstance(reason, str):
                raise Broken(f"got {reason!r}, expected the reason to drop a rollout, or None")
        if first != again:
            raise Broken(f"asked twice about one rollout, it said {first} and {again}")


def sums_over_the_mask(cls: type[Loss], config: PluginConfig) -> None:
    """It gives a 0-dim tensor whose gradient is finite, and zero off the mask."""
    _need_torch()
    import torch

    inputs = _loss_inputs(cls)
    outputs = cls(config)(inputs)
    if not isinstance(outputs, LossOutputs) or outputs.loss.dim():
        raise Broken(f"got {outputs!r}, expected LossOutputs with a 0-dim loss")
    loss: Any = outputs.loss
    _need_gradient(loss)
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
    """It is summed, not averaged: two copies of a sequence give twice the loss."""
    _need_torch()

    component = Component(cls.name, cls)
    if component.scope != "token":
        raise NotApplicable("its scope is not 'token', so it is called for each unit alone")
    once, twice = (cls(config)(_loss_inputs(cls, n)).loss.item() for n in (1, 2))
    if abs(twice - 2 * once) > 1e-4 * max(1.0, abs(once)):
        raise Broken(
            f"one copy gives {once:.6g}, two give {twice:.6g}, expected {2 * once:.6g}. Return "
            "the sum; the trainer divides by the global count of member tokens."
        )


def weighs_each_term(cls: type[Loss], config: PluginConfig) -> None:
    """Each term is multiplied by its ``loss_weights``: twice the weights give twice the loss."""
    _need_torch()
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
    _need_torch()
    import torch

    if Component(cls.name, cls).scope != "token":
        raise NotApplicable("its scope is not 'token'")

    def gradient(logprobs: torch.Tensor) -> torch.Tensor:
        inputs = replace(_loss_inputs(cls), trainer_logprobs=logprobs.requires_grad_())
        loss = cls(config)(inputs).loss
        _need_gradient(loss)
        torch.autograd.backward(loss)
        assert logprobs.grad is not None
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
    _need_torch()
    import torch

    component, inputs = Component(cls.name, cls), _loss_inputs(cls)
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


def _need_torch() -> None:
    if find_spec("torch") is None:
        raise NotApplicable("torch is not installed")


def _need_gradient(loss: Any) -> None:
    """A loss may train a head alone."""
    if not loss.requires_grad:
        raise NotApplicable("the loss does not depend on log π")


def _loss_inputs(cls: type[Loss], copies: int = 1) -> LossInputs:
    """Six tokens, the last off the mask; on the policy, above and below it. Streams that the loss
    reads are 0.5; those that begin with ``top_`` have log(1/4) and log(1/8) for each token."""
    import torch

    given = {
        "trainer_logprobs": torch.tensor([0.9, 0.1, 0.5, 0.5, 0.3, 0.05]).log(),
        "inference_logprobs": torch.tensor([0.6, 0.4, 0.5, 0.2, 0.55, 0.06]).log(),
        "ref_logprobs": torch.tensor([0.8, 0.2, 0.7, 0.4, 0.3, 0.9]).log(),
        "advantages": torch.tensor([1.0, -1.0, 0.5, -0.5, 0.0, 2.0]),
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
    inputs = LossInputs(**known, streams=streams)
    return inputs if "ref_logprobs" in streams else replace(inputs, ref_logprobs=None)


def head_gives_an_output_each(cls: type[Head], config: PluginConfig) -> None:
    """``build`` gives a module from hidden states [N, D] to outputs [N], with weights to train."""
    _need_torch()
    import torch

    module = cls(config).build(8)
    outputs = module(torch.randn(5, 8))
    if not isinstance(outputs, torch.Tensor) or outputs.shape != (5,):
        found = getattr(outputs, "shape", type(outputs).__name__)
        raise Broken(f"5 hidden states of size 8 gave {found}, expected a tensor of shape (5,)")
    if not outputs.requires_grad:
        raise Broken("the output has no gradient: nothing could train the module")


def head_prepares_what_it_writes(cls: type[Head], config: PluginConfig) -> None:
    """``prepare`` gives each stream of ``writes``: one finite value per token."""
    mask = np.array([False, True, True, False, True])
    inputs = HeadInputs(
        outputs=np.where(mask, 0.5, 0.0).astype(np.float32),
        loss_mask=mask,
        streams={name: np.full(5, 0.25, np.float32) for name in cls.reads},
    )
    found = cls(config).prepare(inputs)
    if set(found) != set(cls.writes):
        raise Broken(f"writes is {cls.writes}, and prepare gave {tuple(found)}")
    for name, column in found.items():
        if np.shape(column) != (5,) or not np.isfinite(column).all():
            raise Broken(f"{name}: got {column!r} for 5 tokens, expected 5 finite values")


ENVS = (SampledEnv("small", 3, None), SampledEnv("endless", None, None))


def sampler_in_range(cls: type[Sampler], config: PluginConfig) -> None:
    """It names examples that exist, the same ones for the same seed."""
    first, again = ([*_drawn(cls(config, ENVS, 0), 20)] for _ in range(2))
    for env, example in first:
        if env not in (0, 1) or example < 0 or (env == 0 and example >= 3):
            raise Broken(
                f"gave (env {env}, example {example}) of {len(ENVS)} envs with 3 examples and "
                "without end"
            )
    if first != again:
        raise Broken(f"seed 0 gave {first[:5]} and then {again[:5]}. Draw from self.seed.")


def sampler_resumes(cls: type[Sampler], config: PluginConfig) -> None:
    """It continues from what it saved."""
    if cls.save is Sampler.save:
        raise NotApplicable("saves nothing: a resumed run starts its order anew")
    sampler = cls(config, ENVS, 0)
    _drawn(sampler, 5)
    with TemporaryDirectory() as folder:
        sampler.save(Path(folder))
        expected = _drawn(sampler, 10)
        resumed = cls(config, ENVS, 0)
        resumed.load(Path(folder))
        found = _drawn(resumed, 10)
    if found != expected:
        raise Broken(f"goes on with {found[:5]} after a resume, expected {expected[:5]}")


def _drawn(sampler: Sampler, number: int) -> list[tuple[int, int]]:
    return [sampler.next_example() for _ in range(number)]


BY_KIND: dict[str, tuple[Check, ...]] = {
    "filter": (filter_answers,),
    "loss": (
        *(sums_over_the_mask, is_a_sum, weighs_each_term),
        *(keeps_to_its_scope, reads_what_it_declares),
    ),
    "head": (head_gives_an_output_each, head_prepares_what_it_writes),
    "sampler": (sampler_in_range, sampler_resumes),
}


def check_offer(kind: str, cls: type[Offer], config: PluginConfig) -> Report:
    """Run the checks of one kind. Whatever the class raises in one is a failure."""
    with logged_metrics(cls.name):
        outcomes = tuple(run(check, cls, config) for check in BY_KIND.get(kind, ()))
    nothing = Outcome(
        "conformance", "", "skipped", f"the kit has no checks of {kind}s: test it yourself"
    )
    return Report(kind, cls.name, outcomes or (nothing,))
