"""The rl losses, compared with the golden numbers of the semantics sheet and hand-computed ones."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from math import exp, log
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import prime_rl_losses
from prime_rl import ConfigError, LossInputs, LossOutputs, TokenMetric
from prime_rl.plugins.hookspecs import TRAINER_GROUP
from prime_rl.registry.components import installed_losses
from prime_rl.registry.manager import load_plugins
from prime_rl.registry.offers import LOSS, collect, settings_of
from prime_rl.trainer.loss import count_members, row_loss
from prime_rl.trainer.packed_row import make_row
from prime_rl.wire import MicroBatch
from prime_rl_losses.trust_region import DefaultLoss, IPOLoss

TRAINER = np.log([0.9, 0.1, 0.5, 0.5, 0.3, 0.05])
INFERENCE = np.log([0.6, 0.4, 0.5, 0.2, 0.55, 0.06])
ADVANTAGES = [1, -1, 0.5, -0.5, 0, 2]
MASK = [True, True, True, True, True, False]
REF = np.log([0.8, 0.2, 0.7, 0.4, 0.3, 0.9])


def make_inputs(
    trainer: Any = TRAINER,
    inference: Any = INFERENCE,
    advantages: Any = ADVANTAGES,
    mask: Any = MASK,
    weights: Any = None,
) -> LossInputs:
    """Tensors in double precision. The trainer's logprobs are a leaf."""
    return LossInputs(
        trainer_logprobs=torch.tensor(trainer, dtype=torch.float64, requires_grad=True),
        inference_logprobs=torch.tensor(inference, dtype=torch.float64),
        ref_logprobs=None,
        advantages=torch.tensor(advantages, dtype=torch.float64),
        loss_mask=torch.tensor(mask),
        loss_weights=None if weights is None else torch.tensor(weights, dtype=torch.float64),
    )


def default(**settings: Any) -> DefaultLoss:
    return DefaultLoss(DefaultLoss.config_class(**settings))


def ipo(**settings: Any) -> IPOLoss:
    return IPOLoss(IPOLoss.config_class(**settings))


def gradient(inputs: LossInputs, outputs: LossOutputs) -> list[float]:
    return torch.autograd.grad(outputs.loss, inputs.trainer_logprobs)[0].tolist()


def means(outputs: LossOutputs) -> dict[str, float]:
    """Each metric averaged over its mask; 0 if the mask is empty."""
    found = {}
    for name, metric in outputs.metrics.items():
        assert isinstance(metric, TokenMetric)
        found[name] = float((metric.values * metric.mask).sum() / max(1, int(metric.mask.sum())))
    return found


def test_default_has_the_golden_loss_and_gradient() -> None:
    inputs = make_inputs()
    outputs = default()(inputs)
    assert float(outputs.loss.detach()) == pytest.approx(0.753293, abs=1e-6)
    assert gradient(inputs, outputs) == pytest.approx(
        [0.000811, -0.002773, -0.5, 1.251833, -0.001212, 0], abs=1e-6
    )


def test_default_has_the_golden_metrics() -> None:
    found = means(default()(make_inputs()))
    expected = {
        "is_masked": 0.6,
        "is_masked_low": 0.2,
        "is_masked_high": 0.2,
        "masked_mismatch_kl": 0.29414,
        "unmasked_mismatch_kl": 0.291855,
        "masked_advantage_positive": 1 / 3,  # one of three dropped tokens has A = 1,
        "masked_advantage_negative": 1 / 3,  # one A = -1, and one A = 0
    }
    assert found == pytest.approx(expected, abs=1e-6)


def test_default_has_the_golden_loss_with_weights() -> None:
    outputs = default()(make_inputs(weights=[1, 1, 0.5, 0.5, 2, 1]))
    assert float(outputs.loss.detach()) == pytest.approx(0.378241, abs=1e-6)


def test_ipo_has_the_golden_loss_and_gradient() -> None:
    inputs = make_inputs()
    outputs = ipo()(inputs)
    assert float(outputs.loss.detach()) == pytest.approx(-0.496707, abs=1e-6)
    assert gradient(inputs, outputs) == pytest.approx(
        [0.000811, -0.002773, -0.5, 0.001833, -0.001212, 0], abs=1e-6
    )
    assert means(outputs)["is_masked"] == pytest.approx(0.8)


def test_thresholds_are_strict_and_a_zero_advantage_uses_the_low_one() -> None:
    quarter, half, three = log(0.25), log(0.5), log(0.75)  # differences of exactly 0.25
    inputs = make_inputs([half, half, quarter], [quarter, three, half], [1, -1, 0], [True] * 3)
    at = means(default(dppo_mask_low=0.25, dppo_mask_high=0.25)(inputs))
    assert at["is_masked"] == 0
    below = means(default(dppo_mask_low=0.24, dppo_mask_high=0.24)(inputs))
    assert below["is_masked"] == 1
    high_only = means(default(dppo_mask_low=0.26, dppo_mask_high=0.24)(inputs))
    assert high_only["is_masked"] == pytest.approx(1 / 3)


def test_adv_tau_zero_leaves_only_the_penalty() -> None:
    outputs = default(adv_tau=0, kl_tau=0.5)(make_inputs([log(0.5)], [log(0.25)], [3], [True]))
    assert float(outputs.loss.detach()) == pytest.approx(0.5 * log(2) ** 2)


def test_ratio_clip_bounds_the_ratio_and_stops_its_gradient() -> None:
    inputs = make_inputs([log(0.3), log(0.2)], [log(0.15), log(0.2)], [1, 1], [True, True])
    outputs = default(ratio_clip=1.5, kl_tau=0)(inputs)  # ratios 2 and 1
    assert float(outputs.loss.detach()) == pytest.approx(-1.5 - 1)
    assert gradient(inputs, outputs) == pytest.approx([0, -1])


def test_an_infinite_ratio_on_a_dropped_or_masked_token_gives_no_nan() -> None:
    inputs = make_inputs([log(0.9), log(0.9), log(0.5)], [-2000, -2000, log(0.5)],
                         [1, 1, 1], [True, False, True])  # fmt: skip
    outputs = default()(inputs)
    assert float(outputs.loss.detach()) == pytest.approx(-1 + 1e-3 * (log(0.9) + 2000) ** 2)
    assert gradient(inputs, outputs) == pytest.approx([2e-3 * (log(0.9) + 2000), 0, -1])


def test_without_members_the_loss_is_zero() -> None:
    inputs = make_inputs(mask=[False] * 6)
    outputs = default()(inputs)
    assert float(outputs.loss.detach()) == 0
    assert gradient(inputs, outputs) == [0] * 6
    assert set(means(outputs).values()) == {0.0}


@pytest.mark.parametrize("loss", [default(), ipo()], ids=["default", "ipo"])
def test_one_call_for_all_sequences_equals_one_call_each(loss: DefaultLoss | IPOLoss) -> None:
    assert loss.token_wise
    whole = loss(make_inputs()).loss
    parts = [
        loss(make_inputs(TRAINER[part], INFERENCE[part], ADVANTAGES[part], MASK[part])).loss
        for part in (slice(0, 2), slice(2, 6))
    ]
    assert float(whole.detach()) == pytest.approx(sum(float(part.detach()) for part in parts))


def test_the_mixed_batch_has_the_golden_total_and_gradient() -> None:
    """Two sequences: the first trains by rl and ce, the second by ref_kl; N = (4, 2, 5). Each has a
    token of a prompt before the golden six, because nothing predicts a first token."""
    none = [0.0] * 7

    def prompted(values: Sequence[float]) -> list[float]:
        return [0.0, *values]

    micro_batch = MicroBatch(
        token_ids=np.arange(14, dtype=np.int32),
        loss_mask=np.array(prompted(MASK) * 2, np.bool_),
        inference_logprobs=np.array(prompted(INFERENCE) * 2, np.float32),
        sequence_lengths=np.array([7, 7], np.int32),
        temperatures=np.ones(2, np.float32),
        env_ids=np.zeros(2, np.uint16),
        envs=("a",),
        advantages=np.array(prompted(ADVANTAGES) * 2, np.float32),
        rl_weights=np.array([*prompted([1, 1, 1, 0, 1, 1]), *none], np.float32),
        ce_weights=np.array([*prompted([0, 0, 0, 0.1, 0, 0.1]), *none], np.float32),
        ref_kl_weights=np.array([*none, *prompted(MASK)], np.float32),
        ref_logprobs=np.array(prompted(REF) * 2, np.float32),
    )
    losses = installed_losses().with_rl(default())
    counts = count_members([micro_batch], losses)
    assert counts.totals == {"rl": 4, "ce": 2, "ref_kl": 5}
    trainer = torch.tensor(TRAINER, requires_grad=True)  # both sequences have these logprobs
    row = make_row(micro_batch, torch.device("cpu"))
    of_row = torch.cat([torch.zeros(1), trainer]).repeat(2)
    result = row_loss(row, of_row, losses, counts)
    assert float(result.loss.detach()) == pytest.approx(0.140328, abs=1e-6)
    assert torch.autograd.grad(result.loss, trainer)[0].tolist() == pytest.approx(
        [0.0357, -0.001248, -0.192294, 0.061938, -0.000546, -0.05], abs=1e-6
    )


def test_both_are_registered_through_the_entry_point_group() -> None:
    offers = collect(load_plugins(TRAINER_GROUP), LOSS)
    assert offers["default"].cls is DefaultLoss
    assert offers["ipo"].cls is IPOLoss
    assert offers["ipo"].source.distribution == "prime-rl-losses"


@pytest.mark.parametrize("settings", [{"dppo_mask_low": -0.1}, {"ratio_clip": 0}, {"delta": 8}])
def test_invalid_settings_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        settings_of(DefaultLoss, LOSS, settings, "trainer.loss")


def test_listing_the_plugin_imports_no_torch() -> None:
    assert [each.name for each in prime_rl_losses.register_losses()] == [
        *("default", "ipo", "custom", "ce", "ref_kl", "top_kl")
    ]
    code = "import sys, prime_rl_losses as p; p.register_losses(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_penalty_is_the_squared_log_ratio_and_applies_to_dropped_tokens() -> None:
    inputs = make_inputs([log(0.9)], [log(0.3)], [1], [True])
    outputs = default(kl_tau=2.0)(inputs)
    assert float(outputs.loss.detach()) == pytest.approx(2 * log(3) ** 2)
    assert means(outputs)["masked_mismatch_kl"] == pytest.approx(exp(log(3)) - log(3) - 1)


JUNK = st.sampled_from([np.inf, -np.inf, np.nan, 1e30, -1e30, -3e3, 3e3, 0.0])


@pytest.mark.parametrize("loss", [default(), ipo(), default(ratio_clip=2)], ids=["d", "ipo", "rc"])
@given(data=st.data())
@settings(deadline=None)
def test_values_off_the_mask_change_nothing(loss: Any, data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 6))

    def draw(elements: Any) -> Any:
        return np.array(data.draw(st.lists(elements, min_size=size, max_size=size)))

    mask = draw(st.booleans())
    columns = [draw(st.floats(-5, -0.01)) for _ in range(4)]  # t, i, A, w
    results = []
    for off in (np.zeros(size), draw(JUNK)):
        trainer, inference, advantages, weights = (np.where(mask, c, off) for c in columns)
        inputs = make_inputs(trainer, inference, advantages, mask, weights)
        outputs = loss(inputs)
        results.append((float(outputs.loss.detach()), gradient(inputs, outputs)))
    assert np.isfinite(results[0][1]).all()
    assert results[1][0] == pytest.approx(results[0][0])
    assert results[1][1] == pytest.approx(results[0][1])


@pytest.mark.parametrize("loss", [default(), ipo()], ids=["default", "ipo"])
@given(gap=st.floats(50, 1e4), t=st.floats(-1, -0.01), advantage=st.floats(0.1, 10))
@settings(deadline=None)
def test_a_dropped_token_has_only_the_penalty_whatever_its_ratio(
    loss: Any, gap: float, t: float, advantage: float
) -> None:
    inputs = make_inputs([t], [t - gap], [advantage], [True])  # exp(gap) overflows from 710 on
    outputs = loss(inputs)
    assert float(outputs.loss.detach()) == pytest.approx(1e-3 * gap**2)
    assert gradient(inputs, outputs) == pytest.approx([2e-3 * gap])
