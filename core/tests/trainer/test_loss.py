"""The fixed components, their sum and their denominators.

The rl golden numbers are with the losses plugin.
"""

from __future__ import annotations

from collections.abc import Callable
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
from prime_rl.config.trainer import LossTable
from prime_rl.registry.components import installed_losses
from prime_rl.trainer import parallel
from prime_rl.trainer.logprobs import token_logprobs
from prime_rl.trainer.loss import count_members, row_loss
from prime_rl.trainer.metrics import StepMetrics
from prime_rl.trainer.packed_row import make_row
from prime_rl.wire import MicroBatch

CPU = torch.device("cpu")


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


def loss_of(
    micro_batch: MicroBatch, logprobs: Tensor, rl: Loss | None = None
) -> tuple[float, list[float], dict[str, float]]:
    """Value, gradient on the logprobs, and the metrics as means."""
    leaf = logprobs.clone().requires_grad_()
    row = make_row(micro_batch, CPU)
    losses = installed_losses().with_rl(rl or Reinforce(PluginConfig()))
    counts = count_members([micro_batch], losses)
    result = row_loss(row, leaf, losses, counts)
    (gradient,) = torch.autograd.grad(result.loss, leaf)
    step = StepMetrics(counts)
    for block in result.metrics:
        step.add(block)
    return float(result.loss.detach()), gradient.tolist(), step.result()


def test_members_follow_the_streams(pack: Any) -> None:
    row = pack(
        [[1, 2, 3, 4]],
        prompt=2,
        rl_weights=[1, 1, 0, 0.5],
        ce_weights=[0, 0.1, 0, 0.1],
        ref_kl_weights=[0, 0, 2, 0],
    )
    assert count_members([row, row], installed_losses()).totals == {"rl": 2, "ce": 4, "ref_kl": 2}
    plain = pack([[1, 2, 3, 4]], prompt=2)
    assert count_members([plain], installed_losses()).totals == {"rl": 2}


def test_ranks_exchange_their_counts_once_and_add_them_up(
    pack: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent_values = []

    def gather(own: Any) -> list[Any]:
        sent_values.append(own)
        return [
            own,
            ([("rl", "a", 5, 1, []), ("rl", "m", 1, 1, []), ("ce", "m", 2, 1, [])], 10),
        ]  # the other rank's

    monkeypatch.setattr(parallel, "several_ranks", lambda: True)
    monkeypatch.setattr(parallel, "gather", gather)
    row = pack(
        [[1, 2, 3, 4], [5, 6]], envs=("z", "m"), env_ids=[0, 1], ce_weights=[0, 0, 0, 1, 0, 1]
    )
    counts = count_members([row], installed_losses())
    (sent,) = sent_values
    own = {("rl", "z", 3, 1), ("rl", "m", 1, 1), ("ce", "z", 1, 1), ("ce", "m", 1, 1)}
    assert ({each[:4] for each in sent[0]}, sent[1]) == (own, 6)
    assert counts.totals == {"rl": 10, "ce": 4}
    assert counts.members["rl", "z"] == 3
    assert counts.num_tokens == 16
    assert counts.metrics() == {
        "tokens/rl": 10.0, "tokens/rl/a": 5.0, "tokens/rl/m": 2.0, "tokens/rl/z": 3.0,
        "tokens/ce": 4.0, "tokens/ce/m": 3.0, "tokens/ce/z": 1.0,
    }  # fmt: skip


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


class Reporting(Loss):
    """Nothing but what a test gives it to report, sequence by sequence."""

    name = "reporting"

    def __init__(self, *reports: Any) -> None:
        super().__init__(PluginConfig())
        self.reports = list(reports)

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        return LossOutputs(inputs.trainer_logprobs.sum(), self.reports.pop(0))


def test_metrics_are_averaged_over_sequences_for_all_and_for_each_env(pack: Any) -> None:
    row = pack([[1, 2, 3], [3, 4], [6, 7]], envs=("x", "y"), env_ids=[0, 1, 1])
    one, three = torch.tensor(1.0), torch.tensor(3.0)
    rl = Reporting(
        {"figure": one, "each": torch.tensor([1.0, 2.0, 6.0])},  # of env x
        {"figure": three, "each": torch.tensor([7.0]), "rare": three},  # and twice of env y
        {"figure": torch.tensor(5.0), "each": torch.tensor([])},
    )
    _, _, metrics = loss_of(row, torch.zeros(7), rl)
    expected = {
        "figure": 3.0, "figure/x/mean": 1.0, "figure/y/mean": 4.0,
        "each": 4.0, "each/x/mean": 3.0, "each/y/mean": 7.0,
        "rare": 3.0, "rare/y/mean": 3.0,
    }  # fmt: skip
    assert {name: metrics[name] for name in expected} == expected
    assert "rare/x/mean" not in metrics


@pytest.mark.parametrize("kind", [Reinforce, TokenWiseReinforce])
def test_a_mixed_row_is_read_per_env(kind: type[Loss], pack: Any) -> None:
    row = pack(
        [[1, 2], [3, 4, 5], [6, 7]],
        envs=("y", "x"),
        env_ids=[0, 1, 1],
        advantages=[0, 2, 0, -1, 3, 0, 5],
        ce_weights=[0, 0, 0, 0, 1, 0, 0],
    )
    logprobs = torch.tensor([0.0, -1, -2, 0, -1, 0, -1])  # the row's order: longest first
    _, _, metrics = loss_of(row, logprobs, kind(PluginConfig()))
    expected = {"credit": (2 + 1 + 5) / 3, "credit/y/mean": 2.0, "credit/x/mean": 3.0}
    expected |= {"ce/nll": 2.0, "ce/nll/x/mean": 2.0}
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)
    assert "ce/nll/y/mean" not in metrics


def test_an_infinite_metric_of_one_env_stays_with_it(pack: Any) -> None:
    row = pack([[1, 2], [3, 4]], envs=("x", "y"), env_ids=[0, 1], advantages=[0, np.inf, 0, 1])
    _, _, metrics = loss_of(row, -torch.ones(4), TokenWiseReinforce(PluginConfig()))
    assert metrics["credit/x/mean"] == np.inf
    assert metrics["credit/y/mean"] == 1


@pytest.mark.parametrize(
    ("metric", "found"),
    [(torch.zeros(2, 2), r"shape \(2, 2\)"), (0.5, "float"), (None, "NoneType")],
    ids=["2-D", "float", "None"],
)
def test_a_metric_that_is_no_figure_is_refused(metric: Any, found: str, pack: Any) -> None:
    with pytest.raises(PluginError, match=f"'x': expected a 0-dim tensor .* got .*{found}"):
        loss_of(pack([[1, 2]]), torch.zeros(2), Reporting({"x": metric}))


def test_a_metric_under_a_name_of_the_trainers_own_is_refused(pack: Any) -> None:
    with pytest.raises(PluginError, match=r"loss 'reporting' reports a metric 'loss/mean'.*Rename"):
        loss_of(pack([[1, 2]]), torch.zeros(2), Reporting({"loss/mean": torch.tensor(1.0)}))


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (torch.tensor(1.0), "Tensor"),
        (LossOutputs(torch.zeros(2), {}), r"a loss of shape \(2,\)"),
        (LossOutputs(0.5, {}), "a loss of type float"),  # type: ignore[arg-type]
    ],
    ids=["tensor", "1-D", "float"],
)
def test_a_loss_that_gives_anything_else_is_named(given: Any, found: str, pack: Any) -> None:
    class Wrong(Loss):
        name = "wrong"

        def __call__(self, inputs: LossInputs) -> LossOutputs:
            return given  # type: ignore[no-any-return]

    with pytest.raises(PluginError, match=f"loss 'wrong' returned.*{found}.*expected LossOutputs"):
        row = pack([[1, 2]])
        losses = installed_losses().with_rl(Wrong(PluginConfig()))
        row_loss(make_row(row, CPU), torch.zeros(2), losses, count_members([row], losses))


def test_a_detached_loss_is_refused_unless_it_is_zero(pack: Any) -> None:
    class Detached(Reinforce):
        name = "detached"
        factor = 1.0

        def __call__(self, inputs: LossInputs) -> LossOutputs:
            outputs = super().__call__(inputs)
            return LossOutputs(self.factor * outputs.loss.detach(), {})

    row, logprobs = pack([[1, 2]]), torch.tensor([-1.0, -2.0])
    with pytest.raises(PluginError, match=r"'detached': 1 tokens train in it.*no gradient"):
        loss_of(row, logprobs, Detached(PluginConfig()))
    Detached.factor = 0.0  # a pairwise loss without a pair
    assert loss_of(row, logprobs, Detached(PluginConfig()))[:2] == (0.0, [0.0, 0.0])


def test_per_env_denominators_by_hand(pack: Any) -> None:
    """Env x has 3 rl tokens, y two; ce has one of x and two of y. The weight of a first token,
    which nothing predicts, counts nowhere."""
    row = pack(
        [[1, 2, 3], [3, 4], [5, 6, 7]],
        envs=("y", "x"),
        env_ids=[1, 1, 0],
        advantages=[0, 1, 1, 0, 1, 0, 1, 1],
        ce_weights=[0, 1, 0, 0, 0, 8, 0.5, 1],
    )
    leaf = torch.full((8,), -1.0, requires_grad=True)
    for kind in (Reinforce, TokenWiseReinforce):
        losses = installed_losses().with_rl(kind(PluginConfig()), LossTable(normalize_by="env"))
        result = row_loss(make_row(row, CPU), leaf, losses, count_members([row], losses))
        (gradient,) = torch.autograd.grad(result.loss, leaf)
        third = 1 / 3
        y = [0, -1 / 2 - 0.25, -1 / 2 - 0.5]
        expected = [0, -third - 1, -third, *y, 0, -third]  # the row has the longest first
        assert gradient.tolist() == pytest.approx(expected)
        assert float(result.parts["rl"]) == pytest.approx(1 + 1)
        assert float(result.parts["ce"]) == pytest.approx(1 + 1.5 / 2)


def test_a_token_wise_loss_with_a_metric_of_a_whole_row_is_refused(pack: Any) -> None:
    class Wrong(Reinforce):
        token_wise = True

        def __call__(self, inputs: LossInputs) -> LossOutputs:
            return LossOutputs(inputs.trainer_logprobs.sum(), {"x": torch.tensor(1.0)})

    with pytest.raises(PluginError, match=r"'x'.*TokenMetric, got Tensor"):
        loss_of(pack([[1, 2]]), torch.zeros(2), Wrong(PluginConfig()))


def test_a_micro_batch_without_members_still_backpropagates(pack: Any) -> None:
    value, gradient, metrics = loss_of(pack([[1, 2]], prompt=2), torch.zeros(2))
    assert (value, gradient) == (0.0, [0.0, 0.0])
    assert metrics == {"loss/mean": 0.0, "tokens/rl": 0.0}


def test_a_missing_stream_is_named(pack: Any) -> None:
    row = pack([[1, 2]])
    row.advantages = None
    with pytest.raises(
        StreamError, match=r"envs a: 1 tokens train in the rl component, .*'advantages'"
    ):
        loss_of(row, torch.zeros(2))
    row = pack([[1, 2]], ref_kl_weights=[0, 1])
    with pytest.raises(StreamError, match=r"ref_kl component, .*'ref_logprobs'"):
        loss_of(row, torch.zeros(2))


def parameter_gradient(model: PreTrainedModel, rows: list[MicroBatch]) -> Tensor:
    """The step's gradient, as one vector."""
    model.zero_grad()
    losses = installed_losses().with_rl(Reinforce(PluginConfig()))
    counts = count_members(rows, losses)
    for micro_batch in rows:
        row = make_row(micro_batch, CPU)
        logprobs, _ = token_logprobs(model, row)
        loss = row_loss(row, logprobs, losses, counts).loss
        torch.autograd.backward(loss)
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def test_micro_batches_share_the_steps_denominator(
    make_model: Callable[..., PreTrainedModel], pack: Any, random_documents: Any
) -> None:
    model = make_model()
    documents = random_documents([6, 4, 8])
    together = parameter_gradient(model, [pack(documents)])
    apart = parameter_gradient(model, [pack(documents[:1]), pack(documents[1:])])
    torch.testing.assert_close(together, apart, atol=1e-6, rtol=0)


def test_a_row_whose_other_tokens_have_no_logprob_backpropagates_zeros(pack: Any) -> None:
    micro_batch = pack(
        [[1, 2, 3]], prompt=3, ce_weights=[0, 1, 0], rl_weights=[0] * 3, advantages=[0] * 3
    )
    row = make_row(micro_batch, torch.device("cpu"))
    leaf = torch.tensor([-4.0, -2.0, -np.inf], requires_grad=True)
    losses = installed_losses()
    result = row_loss(row, leaf, losses, count_members([micro_batch], losses))
    (gradient,) = torch.autograd.grad(result.loss, leaf)
    assert float(result.loss.detach()) == 2.0
    assert gradient.tolist() == [0.0, -1.0, 0.0]
