"""entropy_bonus, kl_to_initial and the adaptive weight, against numbers computed manually."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from loss_path import load_losses, loss_and_slopes, rollouts_of

from prime_rl import ConfigError, Loss, LossInputs, StreamError
from prime_rl.registry.offers import ALGORITHM, settings_of
from prime_rl.testing import check_algorithm, logged_metrics, score
from prime_rl_baselines import RLOO, Reinforce
from prime_rl_baselines.penalties import EntropyBonusLoss, KLToInitialConfig, KLToInitialLoss
from prime_rl_devkit.kinds import check_offer

TRAINER = np.log([0.5, 0.9, 0.2, 0.1])
INITIAL = np.log([0.25, 0.9, 0.4, 0.3])
GAIN = TRAINER - INITIAL
WRITTEN = {
    "k1": (GAIN, GAIN),
    "k2": (GAIN**2 / 2, GAIN),
    "k3": (np.exp(-GAIN) - 1 + GAIN, 1 - np.exp(-GAIN)),
}
"""Value and gradient on log π."""


def column(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("estimator", WRITTEN)
def test_the_estimates_of_the_kl(estimator: Any) -> None:
    """The fifth token is off the mask, and infinite; the weights count."""
    weights, zero = np.array([1.0, 1.0, 0.5, 2.0]), torch.zeros(5, dtype=torch.float64)
    trainer = column([*TRAINER, -np.inf]).requires_grad_()
    inputs = LossInputs(
        trainer_logprobs=trainer,
        inference_logprobs=zero,
        ref_logprobs=None,
        advantages=zero,
        loss_mask=torch.arange(5) < 4,
        loss_weights=column([*weights, 1.0]),
        initial_logprobs=column([*INITIAL, np.nan]),
    )
    outputs = KLToInitialLoss(KLToInitialConfig(estimator=estimator))(inputs)
    (slopes,) = torch.autograd.grad(outputs.loss, trainer)
    value, slope = WRITTEN[estimator]
    assert outputs.loss.item() == pytest.approx((weights * value).sum())
    assert slopes.tolist() == pytest.approx([*(weights * slope), 0.0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(d=st.floats(-40, 10, width=32))
def test_every_estimate_has_its_gradient_in_float32_too(d: float, dtype: Any) -> None:
    """k3 once had the gradient 0 in float32, for every policy near its first weights."""
    slope = 1 - np.exp(-max(d, -20.0))
    for estimator, expected in {"k1": d, "k2": d, "k3": slope}.items():
        trainer = torch.tensor([d], dtype=dtype, requires_grad=True)
        zero = torch.zeros(1, dtype=dtype)
        inputs = LossInputs(
            trainer_logprobs=trainer,
            inference_logprobs=zero,
            ref_logprobs=None,
            advantages=zero,
            loss_mask=torch.tensor([True]),
            loss_weights=None,
            initial_logprobs=zero,
        )
        outputs = KLToInitialLoss(KLToInitialConfig(estimator=estimator))(inputs)
        (gradient,) = torch.autograd.grad(outputs.loss, trainer)
        assert gradient.item() == pytest.approx(expected, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("d", [-19.0, -20.0, -20.5, -60.0, -1000.0])
def test_k3_pushes_the_policy_back_however_far_below_it_is(d: float, dtype: Any) -> None:
    """Up to -20 it is the formula; below, the line through its value at -20 with the slope there.
    The loss falls where log π rises, everywhere, and all numbers are finite."""
    trainer = torch.tensor([-0.5, d - 0.5], dtype=dtype).requires_grad_()
    inputs = LossInputs(
        trainer_logprobs=trainer,
        inference_logprobs=torch.zeros(2, dtype=dtype),
        ref_logprobs=None,
        advantages=torch.zeros(2, dtype=dtype),
        loss_mask=torch.tensor([False, True]),
        loss_weights=None,
        initial_logprobs=torch.tensor([-0.5, -0.5], dtype=dtype),
    )
    outputs = KLToInitialLoss(KLToInitialConfig(estimator="k3"))(inputs)
    (slopes,) = torch.autograd.grad(outputs.loss, trainer)
    at = max(d, -20.0)
    slope = 1 - np.exp(-at)
    expected = np.exp(-at) - 1 + at + slope * (d - at)
    assert outputs.loss.item() == pytest.approx(expected, rel=1e-5)
    assert slopes.tolist() == pytest.approx([0.0, slope], rel=1e-5)
    assert slopes[1] < 0 < outputs.loss


def test_the_expected_gradients_are_those_of_the_two_divergences() -> None:
    """Over a vocabulary of 3 with logits x: sum_v p_v slope_v d log p_v / dx, enumerated, against
    central differences of KL(p || q) and KL(q || p)."""
    x, q = np.array([0.3, -0.5, 0.1]), np.array([0.2, 0.5, 0.3])

    def p_of(logits: Any) -> Any:
        return np.exp(logits) / np.exp(logits).sum()

    def differences(divergence: Any) -> Any:
        steps = np.eye(3) * 1e-6
        return [(divergence(p_of(x + s)) - divergence(p_of(x - s))) / 2e-6 for s in steps]

    p = p_of(x)
    gain = np.log(p / q)
    scores = np.eye(3) - p  # [v, x] d log p_v / dx
    reverse = differences(lambda p: (p * np.log(p / q)).sum())
    forward = differences(lambda p: (q * np.log(q / p)).sum())
    assert (p * gain) @ scores == pytest.approx(reverse, abs=1e-8)  # k1 and k2
    assert (p * (1 - np.exp(-gain))) @ scores == pytest.approx(forward, abs=1e-8)  # k3


def test_the_bonus_is_the_mean_entropy_times_its_weight_beside_the_policy_loss() -> None:
    """Weight 0.5 on 4 tokens in rl and in entropy_bonus, each with a divisor of its own."""
    algorithm = RLOO(settings_of(RLOO, ALGORITHM, {"penalties": {"entropy_bonus": 0.5}}, "algo"))
    group = rollouts_of([1, 0], [1, 3], [*TRAINER])
    score(algorithm, group)
    entropies = [0.1, 0.7, 0.4, 0.2]
    losses = load_losses(loss={"type": "ppo_clip"})
    loss, slopes = loss_and_slopes(algorithm, group, [*TRAINER], losses, entropies=entropies)
    policy = -np.array([1, -1, -1, -1]) / 4  # on the policy the ratio is 1
    assert loss == pytest.approx(policy.sum() - 0.5 * np.mean(entropies), rel=1e-6)
    assert slopes == pytest.approx(policy.tolist(), rel=1e-6)


def adaptive(cls: Any = RLOO, **table: Any) -> Any:
    return cls(settings_of(cls, ALGORITHM, {"entropy": {"target": 1.0, **table}}, "algo"))


def weight_of(algorithm: Any, logprob: float) -> tuple[float, float]:
    """The weight in a batch whose tokens have this log μ, and as it is logged."""
    group = rollouts_of([1, 0], [1, 3], [logprob] * 4)
    with logged_metrics(algorithm.name) as logged:
        score(algorithm, group)
    column = group[0].samples[0].streams.get("entropy_bonus_weights")
    (found,) = logged.values()
    return 0.0 if column is None else round(float(column[-1]), 6), found


def test_the_bonus_grows_while_the_entropy_is_below_its_target() -> None:
    """Entropy 0.5 three times, 2 twice, and 0.5: c = 0, 1, 2, 3, 2, 1 times delta."""
    algorithm = adaptive()
    found = [weight_of(algorithm, logprob) for logprob in (-0.5, -0.5, -0.5, -2, -2, -0.5)]
    expected = [0, 0.005, 0.01, 0, 0, 0.005]
    assert [weight for weight, _ in found] == expected
    assert [logged for _, logged in found] == pytest.approx(expected)


@pytest.mark.parametrize("cls", [RLOO, Reinforce])
def test_the_adaptive_weight_goes_on_after_a_resume(cls: Any, tmp_path: Path) -> None:
    straight, resumed = adaptive(cls, delta=0.1), adaptive(cls, delta=0.1)
    weight_of(straight, -0.5)
    straight.save(tmp_path)
    resumed.load(tmp_path)
    assert weight_of(resumed, -0.5)[0] == weight_of(straight, -0.5)[0] == 0.1
    (tmp_path / "entropy_coefficient.json").write_text("[]")
    with pytest.raises(ConfigError, match=f"not a weight that {cls.name} saved"):
        resumed.load(tmp_path)


def test_two_weights_of_the_entropy_are_refused() -> None:
    table = {"entropy": {"target": 1}, "penalties": {"entropy_bonus": 0.1}}
    with pytest.raises(ConfigError, match="both weigh entropy_bonus: remove one of them"):
        settings_of(RLOO, ALGORITHM, table, "algo")


def test_the_conformance_checks_pass() -> None:
    check_algorithm(adaptive())


@pytest.mark.parametrize(
    ("cls", "table"),
    [(EntropyBonusLoss, {}), *((KLToInitialLoss, {"estimator": each}) for each in WRITTEN)],
)
def test_the_checks_of_losses_pass(cls: type[Loss], table: dict[str, Any]) -> None:
    report = check_offer("loss", cls, cls.config_class(**table))
    assert report.ok, report


def test_the_kl_without_its_table_is_refused() -> None:
    algorithm = RLOO(settings_of(RLOO, ALGORITHM, {"penalties": {"kl_to_initial": 0.1}}, "algo"))
    group = rollouts_of([1, 0], [1, 3], [*TRAINER])
    score(algorithm, group)
    with pytest.raises(StreamError, match=r"trainer\.losses\.kl_to_initial.*estimator"):
        loss_and_slopes(algorithm, group, [*TRAINER], load_losses())


def test_the_kl_trains_beside_the_policy_loss_with_its_weight() -> None:
    algorithm = RLOO(settings_of(RLOO, ALGORITHM, {"penalties": {"kl_to_initial": 0.1}}, "algo"))
    group = rollouts_of([1, 0], [1, 3], [*TRAINER])
    score(algorithm, group)
    losses = load_losses(loss={"type": "ppo_clip"}, losses={"kl_to_initial": {"estimator": "k3"}})
    loss, slopes = loss_and_slopes(
        algorithm, group, [*TRAINER], losses, initial_logprobs=[*INITIAL]
    )
    policy, (value, slope) = -np.array([1, -1, -1, -1]) / 4, WRITTEN["k3"]
    assert loss == pytest.approx(policy.sum() + 0.1 * value.mean(), rel=1e-6)
    assert slopes == pytest.approx((policy + 0.1 * slope / 4).tolist(), rel=1e-6)


def test_a_coefficient_holds_the_kl_at_its_target(tmp_path: Path) -> None:
    """Target 0.1; 0.11 is 10 % above it, 0.5 and 0 are beyond the bound of 20 %."""
    config = KLToInitialConfig(estimator="k2", target=0.1)
    loss = KLToInitialLoss(config)
    expected = 1.0
    for step, (estimate, factor) in enumerate([(0.11, 1.01), (0.5, 1.02), (0.0, 0.98)], start=1):
        loss.batch_trained(step, {"kl_to_initial/value": estimate})
        expected *= factor
        assert loss.coefficient == pytest.approx(expected)
    loss.batch_trained(4, {})  # nothing trained in it
    loss.batch_trained(5, {"kl_to_initial/value": float("nan")})
    assert loss.coefficient == pytest.approx(expected)

    zero = torch.zeros(1, dtype=torch.float64)
    inputs = LossInputs(
        trainer_logprobs=column([0.3]),
        inference_logprobs=zero,
        ref_logprobs=None,
        advantages=zero,
        loss_mask=torch.tensor([True]),
        loss_weights=column([2.0]),
        initial_logprobs=zero,
    )
    outputs = loss(inputs)
    assert outputs.loss.item() == pytest.approx(expected * 2 * 0.3**2 / 2)
    assert outputs.metrics["coefficient"].values.item() == pytest.approx(expected)

    loss.save(tmp_path)
    resumed = KLToInitialLoss(config)
    resumed.load(tmp_path)
    assert resumed.coefficient == loss.coefficient
    (tmp_path / "coefficient.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"coefficient.json has no coefficient of kl_to_initial"):
        resumed.load(tmp_path)


def test_without_a_target_the_weight_stays_and_nothing_is_kept(tmp_path: Path) -> None:
    loss = KLToInitialLoss(KLToInitialConfig(estimator="k2"))
    loss.batch_trained(1, {"kl_to_initial/value": 9.0})
    loss.save(tmp_path)
    assert loss.coefficient == 1.0 and not [*tmp_path.iterdir()]
