"""The fixed components, their sum and their denominators.

The rl golden numbers are with the losses plugin.
"""

from __future__ import annotations

from collections.abc import Callable
from math import exp, log
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from prime_rl import (
    Loss,
    LossInputs,
    LossOutputs,
    PluginConfig,
    PluginError,
    StreamError,
    TokenMetric,
)
from prime_rl.trainer.logprobs import token_logprobs
from prime_rl.trainer.loss import ce_loss, ref_kl_loss, row_loss
from prime_rl.trainer.row import count_members, make_row
from prime_rl.wire import MicroBatch

CPU = torch.device("cpu")
TRAINER = np.log([0.9, 0.1, 0.5, 0.5, 0.3, 0.05])
INFERENCE = np.log([0.6, 0.4, 0.5, 0.2, 0.55, 0.06])
MASK = [True, True, True, True, True, False]
REF = np.log([0.8, 0.2, 0.7, 0.4, 0.3, 0.9])


class Reinforce(Loss):
    """-A * t, with two metrics."""

    name = "reinforce"

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        per_token = -inputs.advantages * inputs.trainer_logprobs
        loss = torch.where(inputs.loss_mask, per_token, 0.0).sum()
        length = torch.tensor(float(len(inputs.advantages)))
        credit = TokenMetric(inputs.advantages, inputs.loss_mask)
        return LossOutputs(
            loss, {"credit": credit} if self.token_wise else {"credit": credit, "length": length}
        )


class TokenWiseReinforce(Reinforce):
    """The same, all sequences in one call."""

    token_wise = True


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
    outputs = ce_loss(make_inputs(weights=[0.1] * 6))
    assert float(outputs.loss.detach()) == pytest.approx(0.499821, abs=1e-6)
    assert mean(outputs.metrics["nll"]) == pytest.approx(4.99821 / 5, abs=1e-5)


def test_ref_kl_has_the_golden_loss_gradient_and_metric() -> None:
    inputs = make_inputs()
    outputs = ref_kl_loss(inputs)
    assert float(outputs.loss.detach()) == pytest.approx(0.401354, abs=1e-6)
    (gradient,) = torch.autograd.grad(outputs.loss, inputs.trainer_logprobs)
    assert gradient.tolist() == pytest.approx(
        [0.177485, -0.002773, -0.336472, 0.559691, -0.001212, 0], abs=1e-6
    )
    assert mean(outputs.metrics["ref_kl"]) == pytest.approx(0.137739, abs=1e-6)
    # d = .3, -.3, 0, .3, -.25: two fell by more than 0.2
    assert mean(outputs.metrics["ref_kl/is_masked"]) == pytest.approx(2 / 5)


def test_ref_kl_is_finite_where_a_token_off_the_mask_has_an_infinite_ratio() -> None:
    inputs = make_inputs()
    inputs.inference_logprobs[5] = -2000
    outputs = ref_kl_loss(inputs)
    assert float(outputs.loss.detach()) == pytest.approx(0.401354, abs=1e-6)
    assert torch.autograd.grad(outputs.loss, inputs.trainer_logprobs)[0].isfinite().all()


def loss_of(
    micro_batch: MicroBatch, logprobs: Tensor, rl: Loss | None = None
) -> tuple[float, list[float], dict[str, float]]:
    """Value, gradient on the logprobs, and the metrics as means."""
    leaf = logprobs.clone().requires_grad_()
    row = make_row(micro_batch, CPU)
    result = row_loss(row, leaf, rl or Reinforce(PluginConfig()), count_members([micro_batch]))
    (gradient,) = torch.autograd.grad(result.loss, leaf)
    metrics = {name: float(total) / number for name, (total, number) in result.metrics.items()}
    return float(result.loss.detach()), gradient.tolist(), metrics


def test_members_follow_the_streams(pack: Any) -> None:
    row = pack(
        [[1, 2, 3, 4]],
        prompt=2,
        rl_weights=[1, 1, 0, 0.5],
        ce_weights=[0, 0.1, 0, 0.1],
        ref_kl_weights=[0, 0, 2, 0],
    )
    assert count_members([row, row]) == {"rl": 2, "ce": 4, "ref_kl": 2}
    assert count_members([pack([[1, 2, 3, 4]], prompt=2)]) == {"rl": 2, "ce": 0, "ref_kl": 0}


def test_ranks_add_their_counts_in_one_collective_of_three(
    pack: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def as_if_two_ranks_were_alike(counts: Tensor) -> None:
        calls.append((counts.dtype, counts.tolist()))
        counts.mul_(2)

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "all_reduce", as_if_two_ranks_were_alike)
    row = pack([[1, 2, 3, 4]], ce_weights=[0, 0, 0, 1])
    assert count_members([row]) == {"rl": 6, "ce": 2, "ref_kl": 0}
    assert calls == [(torch.int64, [3, 1, 0])]


def test_denominators_are_counts_not_sums_of_weights(pack: Any) -> None:
    logprobs = torch.tensor([-1.0, -2.0, -4.0])
    row = pack([[1, 2, 3]], rl_weights=[0, 0, 0], ce_weights=[0, 0.1, 0.1], advantages=[0, 0, 0])
    value, gradient, _ = loss_of(row, logprobs)
    assert value == pytest.approx(0.1 * (2 + 4) / 2)
    assert gradient == pytest.approx([0, -0.05, -0.05])


def test_overlapping_components_add_up(pack: Any) -> None:
    logprobs = torch.tensor([-1.0, -2.0, -4.0])
    row = pack([[1, 2, 3]], prompt=2, ce_weights=[0, 1, 0.5], advantages=[0, 0, 3])
    value, gradient, _ = loss_of(row, logprobs)
    assert value == pytest.approx(3 * 4 / 1 + (2 + 0.5 * 4) / 2)
    assert gradient == pytest.approx([0, -0.5, -3 - 0.25])


def test_a_loss_called_once_a_sequence_equals_one_called_once_a_row(pack: Any) -> None:
    row = pack([[1, 2], [3, 4, 5], [6]], advantages=[0, 2, 0, -1, 3, 0])
    logprobs = torch.linspace(-3, -1, 6)
    value, gradient, metrics = loss_of(row, logprobs, Reinforce(PluginConfig()))
    whole_value, whole_gradient, whole_metrics = loss_of(
        row, logprobs, TokenWiseReinforce(PluginConfig())
    )
    assert value == pytest.approx(whole_value)
    assert gradient == pytest.approx(whole_gradient)
    # means of the sequences with members: (2) and (-1, 3); the third has none
    assert metrics["credit"] == whole_metrics["credit"] == pytest.approx((2 + 1) / 2)
    assert metrics["length"] == pytest.approx((2 + 3) / 2)


def test_a_token_wise_loss_with_a_metric_of_a_whole_row_is_refused(pack: Any) -> None:
    class Wrong(Reinforce):
        token_wise = True

        def __call__(self, inputs: LossInputs) -> LossOutputs:
            return LossOutputs(inputs.trainer_logprobs.sum(), {"x": torch.tensor(1.0)})

    with pytest.raises(PluginError, match=r"'x'.*TokenMetric, got Tensor"):
        loss_of(pack([[1, 2]]), torch.zeros(2), Wrong(PluginConfig()))


def test_a_micro_batch_without_members_still_backpropagates(pack: Any) -> None:
    value, gradient, metrics = loss_of(pack([[1, 2]], prompt=2), torch.zeros(2))
    assert (value, gradient, metrics) == (0.0, [0.0, 0.0], {})


def test_a_missing_stream_is_named(pack: Any) -> None:
    row = pack([[1, 2]])
    row.advantages = None
    with pytest.raises(StreamError, match="rl component, but the stream 'advantages' is absent"):
        make_row(row, CPU)
    with pytest.raises(StreamError, match="ref_kl component, but the stream 'ref_logprobs'"):
        make_row(pack([[1, 2]], ref_kl_weights=[0, 1]), CPU)


def parameter_gradient(model: PreTrainedModel, rows: list[MicroBatch]) -> Tensor:
    """The step's gradient, as one vector."""
    model.zero_grad()
    counts = count_members(rows)
    for micro_batch in rows:
        row = make_row(micro_batch, CPU)
        logprobs, _ = token_logprobs(model, row)
        loss = row_loss(row, logprobs, Reinforce(PluginConfig()), counts).loss
        torch.autograd.backward(loss)
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def test_components_do_not_dilute_each_other(
    make_model: Callable[..., PreTrainedModel], pack: Any, random_documents: Any
) -> None:
    """What rl tokens contribute is the same with and without ce and ref_kl tokens in the batch."""
    model = make_model()
    mine, others = random_documents([6, 4]), random_documents([9, 5, 7], seed=3)
    none, some = [0.0] * 21, [0.0, *[0.7] * 8, 0.0, *[0.7] * 4, 0.0, *[0.7] * 6]
    ce = pack(others, rl_weights=none, ce_weights=some, advantages=none)
    ref_kl = pack(others, rl_weights=none, ref_kl_weights=some, ref_logprobs=[-1.0] * 21)
    alone = parameter_gradient(model, [pack(mine)])
    for other in (ce, ref_kl):
        together = parameter_gradient(model, [pack(mine), other])
        of_other = parameter_gradient(model, [other])
        torch.testing.assert_close(together - of_other, alone, atol=1e-6, rtol=0)
        assert of_other.abs().max() > 1e-3


def test_micro_batches_share_the_steps_denominator(
    make_model: Callable[..., PreTrainedModel], pack: Any, random_documents: Any
) -> None:
    model = make_model()
    documents = random_documents([6, 4, 8])
    together = parameter_gradient(model, [pack(documents)])
    apart = parameter_gradient(model, [pack(documents[:1]), pack(documents[1:])])
    torch.testing.assert_close(together, apart, atol=1e-6, rtol=0)


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
    assert float(ref_kl_loss(inputs).loss) == pytest.approx(expected)
