"""Cross entropy and KL to a reference: golden numbers."""

from __future__ import annotations

from math import exp, log

import numpy as np
import pytest
import torch
from torch import Tensor

from prime_rl import (
    LossInputs,
    PluginConfig,
    TokenMetric,
)
from prime_rl_losses.distill import CrossEntropy, ReferenceKL

TRAINER = np.log([0.9, 0.1, 0.5, 0.5, 0.3, 0.05])


INFERENCE = np.log([0.6, 0.4, 0.5, 0.2, 0.55, 0.06])


MASK = [True, True, True, True, True, False]


REF = np.log([0.8, 0.2, 0.7, 0.4, 0.3, 0.9])


def make_inputs(weights: list[float] | None = None, mask: list[bool] = MASK) -> LossInputs:
    return LossInputs(
        trainer_logprobs=torch.tensor(TRAINER, requires_grad=True),
        inference_logprobs=torch.tensor(INFERENCE),
        ref_logprobs=torch.tensor(REF),
        advantages=torch.full((6,), float("nan")),  # neither component may read them
        loss_mask=torch.tensor(mask),
        loss_weights=None if weights is None else torch.tensor(weights),
    )


def mean(metric: Tensor | TokenMetric) -> float:
    assert isinstance(metric, TokenMetric)
    return float(metric.values[metric.mask].mean().detach())


def test_ce_has_the_golden_loss_and_an_unweighted_nll() -> None:
    outputs = CrossEntropy(PluginConfig())(make_inputs(weights=[0.1] * 6))
    assert float(outputs.loss.detach()) == pytest.approx(0.499821, abs=1e-6)
    assert mean(outputs.metrics["nll"]) == pytest.approx(4.99821 / 5, abs=1e-5)


def test_ref_kl_has_the_golden_loss_gradient_and_metric() -> None:
    inputs = make_inputs()
    outputs = ReferenceKL(PluginConfig())(inputs)
    assert float(outputs.loss.detach()) == pytest.approx(0.401354, abs=1e-6)
    (gradient,) = torch.autograd.grad(outputs.loss, inputs.trainer_logprobs)
    assert gradient.tolist() == pytest.approx(
        [0.177485, -0.002773, -0.336472, 0.559691, -0.001212, 0], abs=1e-6
    )
    assert mean(outputs.metrics["ref_kl"]) == pytest.approx(0.137739, abs=1e-6)
    # d = .3, -.3, 0, .3, -.25: two fell by more than 0.2
    assert mean(outputs.metrics["is_masked"]) == pytest.approx(2 / 5)


def test_ref_kl_is_finite_where_a_token_off_the_mask_has_an_infinite_ratio() -> None:
    inputs = make_inputs()
    inputs.inference_logprobs[5] = -2000
    outputs = ReferenceKL(PluginConfig())(inputs)
    assert float(outputs.loss.detach()) == pytest.approx(0.401354, abs=1e-6)
    assert torch.autograd.grad(outputs.loss, inputs.trainer_logprobs)[0].isfinite().all()


def test_ref_kl_by_hand() -> None:
    inputs = LossInputs(
        trainer_logprobs=torch.tensor([log(0.5)], dtype=torch.float64),
        inference_logprobs=torch.tensor([log(0.25)], dtype=torch.float64),
        ref_logprobs=torch.tensor([log(0.75)], dtype=torch.float64),
        advantages=torch.zeros(1),
        loss_mask=torch.tensor([True]),
        loss_weights=torch.tensor([0.5]),
    )
    expected = 0.5 * (-log(1.5) * exp(log(2)) + 1e-3 * log(2) ** 2)
    assert float(ReferenceKL(PluginConfig())(inputs).loss) == pytest.approx(expected)
