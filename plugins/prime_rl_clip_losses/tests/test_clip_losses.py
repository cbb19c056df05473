"""ppo_clip and cispo, compared with hand-computed numbers and the formulas as written."""

from __future__ import annotations

import subprocess
import sys
from math import log
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import prime_rl_clip_losses
from prime_rl import ConfigError, Loss, LossInputs, LossOutputs, TokenMetric
from prime_rl.plugins.hookspecs import TRAINER_GROUP
from prime_rl.registry.manager import load_plugins
from prime_rl.registry.offers import LOSS, collect, settings_of
from prime_rl_clip_losses.cispo import CISPOLoss
from prime_rl_clip_losses.ppo_clip import PPOClipLoss

TRAINER = np.log([0.9, 0.1, 0.5, 0.5, 0.3, 0.05])
INFERENCE = np.log([0.6, 0.4, 0.5, 0.2, 0.55, 0.06])  # ratios 1.5, .25, 1, 2.5, .5454, .8333
ADVANTAGES = [1, -1, 0.5, -0.5, 0, 2]
MASK = [True, True, True, True, True, False]
WEIGHTS = [1, 1, 0.5, 0.5, 2, 1]


def make_inputs(
    trainer: Any = TRAINER,
    inference: Any = INFERENCE,
    advantages: Any = ADVANTAGES,
    mask: Any = MASK,
    weights: Any = None,
) -> LossInputs:
    return LossInputs(
        trainer_logprobs=torch.tensor(trainer, dtype=torch.float64, requires_grad=True),
        inference_logprobs=torch.tensor(inference, dtype=torch.float64),
        ref_logprobs=None,
        advantages=torch.tensor(advantages, dtype=torch.float64),
        loss_mask=torch.tensor(mask),
        loss_weights=None if weights is None else torch.tensor(weights, dtype=torch.float64),
    )


def ppo_clip(**table: Any) -> PPOClipLoss:
    return PPOClipLoss(PPOClipLoss.config_class(**table))


def cispo(**table: Any) -> CISPOLoss:
    return CISPOLoss(CISPOLoss.config_class(**table))


def value(outputs: LossOutputs) -> float:
    return float(outputs.loss.detach())


def gradient(inputs: LossInputs, outputs: LossOutputs) -> list[float]:
    found: list[float] = torch.autograd.grad(outputs.loss, inputs.trainer_logprobs)[0].tolist()
    return found


def mean(outputs: LossOutputs, name: str) -> float:
    metric = outputs.metrics[name]
    assert isinstance(metric, TokenMetric)
    return float(metric.values[metric.mask].mean())


def test_ppo_clip_gives_hand_computed_numbers() -> None:
    inputs = make_inputs()
    outputs = ppo_clip()(inputs)
    # min(r A, clip(r, .8, 1.2) A): 1.2 (clipped), -.8 (clipped), .5, -1.25, 0
    assert value(outputs) == pytest.approx(-(1.2 - 0.8 + 0.5 - 1.25))
    assert gradient(inputs, outputs) == pytest.approx([0, 0, -0.5, 1.25, 0, 0])
    assert mean(outputs, "is_masked") == pytest.approx(2 / 5)
    assert mean(outputs, "is_masked_low") == mean(outputs, "is_masked_high") == pytest.approx(0.2)


def test_ppo_clip_gives_hand_computed_numbers_with_weights_and_other_bounds() -> None:
    inputs = make_inputs(weights=WEIGHTS)
    outputs = ppo_clip()(inputs)
    assert value(outputs) == pytest.approx(-(1.2 - 0.8 + 0.25 - 0.625))
    assert gradient(inputs, outputs) == pytest.approx([0, 0, -0.25, 0.625, 0, 0])
    outputs = ppo_clip(clip_eps_low=0.9, clip_eps_high=0.3)(inputs)  # .25 is inside, 1.5 is not
    assert value(outputs) == pytest.approx(-(1.3 - 0.25 + 0.25 - 0.625))
    assert gradient(inputs, outputs) == pytest.approx([0, 0.25, -0.25, 0.625, 0, 0])


def test_cispo_gives_hand_computed_numbers() -> None:
    inputs = make_inputs()
    outputs = cispo()(inputs)  # no ratio above 5
    terms = [1.5 * log(0.9), -0.25 * log(0.1), 0.5 * log(0.5), -1.25 * log(0.5), 0]
    assert value(outputs) == pytest.approx(-sum(terms)) == pytest.approx(-0.937466, abs=1e-6)
    assert gradient(inputs, outputs) == pytest.approx([-1.5, 0.25, -0.5, 1.25, 0, 0])
    assert mean(outputs, "clip_frac_high") == mean(outputs, "clip_frac_low") == 0


def test_cispo_gives_hand_computed_numbers_with_both_bounds_and_weights() -> None:
    inputs = make_inputs(weights=WEIGHTS)
    outputs = cispo(clip_eps_low=0.2, clip_eps_high=0.2)(inputs)  # 1.2, .8, 1, 1.2, .8
    terms = [1.2 * log(0.9), -0.8 * log(0.1), 0.25 * log(0.5), -0.3 * log(0.5), 0]
    assert value(outputs) == pytest.approx(-sum(terms))
    # Every token keeps a gradient. Beyond the bounds, the bound is the weight.
    assert gradient(inputs, outputs) == pytest.approx([-1.2, 0.8, -0.25, 0.3, 0, 0])
    assert mean(outputs, "clip_frac_high") == mean(outputs, "clip_frac_low") == pytest.approx(0.4)
    assert mean(outputs, "importance_weight") == pytest.approx((1.2 + 0.8 + 1 + 1.2 + 0.8) / 5)


@pytest.mark.parametrize("weighted", [False, True])
@given(data=st.data())
@settings(deadline=None)
def test_both_equal_their_formulas_as_written(weighted: bool, data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 6))

    def draw(low: float, high: float) -> Any:
        return np.array(data.draw(st.lists(st.floats(low, high), min_size=size, max_size=size)))

    weights = draw(0.1, 2) if weighted else None
    inputs = make_inputs(draw(-3, -0.1), draw(-3, -0.1), draw(-2, 2), [True] * size, weights)
    t, i, a = inputs.trainer_logprobs, inputs.inference_logprobs, inputs.advantages
    w, ratio = 1.0 if weights is None else inputs.loss_weights, (t - i).exp()
    surrogate = -(w * torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a)).sum()  # type: ignore[operator]
    reinforce = -(w * ratio.clamp(0.5, 1.5).detach() * a * t).sum()  # type: ignore[operator]
    for loss, written in ((ppo_clip(), surrogate),
                          (cispo(clip_eps_low=0.5, clip_eps_high=0.5), reinforce)):  # fmt: skip
        outputs = loss(inputs)
        assert value(outputs) == pytest.approx(float(written.detach()), abs=1e-12)
        (expected,) = torch.autograd.grad(written, t, retain_graph=True)
        assert gradient(inputs, outputs) == pytest.approx(expected.tolist(), abs=1e-12)


JUNK = st.sampled_from([np.inf, -np.inf, np.nan, 1e30, -1e30, -3e3, 3e3, 0.0])
LOSSES = [ppo_clip(), cispo(), cispo(clip_eps_low=0.2)]


@pytest.mark.parametrize("loss", LOSSES, ids=["ppo_clip", "cispo", "cispo both"])
@given(data=st.data())
@settings(deadline=None)
def test_values_off_the_mask_change_nothing(loss: Loss, data: st.DataObject) -> None:
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
        results.append((value(outputs), gradient(inputs, outputs)))
    assert np.isfinite(results[0][1]).all()
    assert results[1][0] == pytest.approx(results[0][0])
    assert results[1][1] == pytest.approx(results[0][1])


@pytest.mark.parametrize("gap", [100.0, 2000.0])  # exp(2000) overflows
def test_a_large_ratio_beyond_the_clip_gives_no_nan(gap: float) -> None:
    inputs = make_inputs([-0.5, -0.5], [-gap, -gap], [2, 0], [True, True])
    outputs = ppo_clip()(inputs)
    assert value(outputs) == pytest.approx(-2.4)
    assert gradient(inputs, outputs) == [0, 0]
    outputs = cispo()(inputs)
    assert value(outputs) == pytest.approx(5 * 2 * 0.5)
    assert gradient(inputs, outputs) == [-10, 0]


@pytest.mark.parametrize("loss", LOSSES[:2], ids=["ppo_clip", "cispo"])
def test_one_call_for_all_sequences_equals_one_call_each(loss: Loss) -> None:
    assert loss.token_wise
    whole = loss(make_inputs())
    parts = [
        loss(make_inputs(TRAINER[part], INFERENCE[part], ADVANTAGES[part], MASK[part]))
        for part in (slice(0, 2), slice(2, 6))
    ]
    assert value(whole) == pytest.approx(sum(map(value, parts)))


def test_both_are_registered_through_the_entry_point_group_without_torch() -> None:
    offers = collect(load_plugins(TRAINER_GROUP), LOSS)
    assert offers["ppo_clip"].cls is PPOClipLoss
    assert offers["cispo"].cls is CISPOLoss
    assert offers["cispo"].source.distribution == "prime-rl-clip-losses"
    assert prime_rl_clip_losses.register_losses()[:2] == [PPOClipLoss, CISPOLoss]
    code = (
        "import sys, prime_rl_clip_losses as p; p.register_losses(); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("table", [{"clip_eps_low": 1.1}, {"clip_eps_high": -1}, {"delta": 8}])
@pytest.mark.parametrize("cls", [PPOClipLoss, CISPOLoss])
def test_invalid_settings_are_refused(cls: type[Loss], table: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(table))):
        settings_of(cls, LOSS, table, "trainer.loss")
