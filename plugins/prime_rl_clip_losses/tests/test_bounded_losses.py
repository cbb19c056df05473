"""The further losses against their formulas in NumPy, through packer and trainer.

Three rollouts of one group, of 2, 3 and 1 tokens; gradients are closed forms or finite differences.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from loss_path import load_losses, loss_and_slopes, rollouts_of

from prime_rl import ConfigError, Loss, LossInputs
from prime_rl.registry.offers import LOSS, settings_of
from prime_rl_clip_losses import LOSSES
from prime_rl_devkit.kinds import check_offer

LENGTHS = [2, 3, 1]
OWNER = np.repeat([0, 1, 2], LENGTHS)
TRAINER = np.log([0.9, 0.3, 0.5, 0.26, 0.3, 0.5])
INFERENCE = np.log([0.6, 0.4, 0.5, 0.2, 0.6, 0.1])  # ratios 1.5, .75, 1, 1.3, .5, 5
OLD = np.log([0.8, 0.3, 0.25, 0.26, 0.24, 0.6])  # u = 1.125, 1, 2, 1, 1.25, .8333
BY_TOKEN = np.array([1.0, -0.5, 0.25, 2.0, -1.0, -2.0])
BY_ROLLOUT = np.array([1.0, -0.5, -2.0])[OWNER]
BY_NAME = {cls.name: cls for cls in LOSSES}


def step(name: str, advantages: Any, trainer: Any = TRAINER, **table: Any) -> tuple[Any, Any]:
    """Loss and gradient of a step in which the loss trains the three rollouts."""
    rollouts = rollouts_of([0, 0, 0], LENGTHS, [*INFERENCE])
    for index, rollout in enumerate(rollouts):
        rollout.assign_advantages(advantages[index == OWNER])
    losses = load_losses(losses={name: table})
    loss, slopes = loss_and_slopes(name, rollouts, [*trainer], losses, old_logprobs=[*OLD])
    return loss, np.array(slopes)


def approximately(expected: Any) -> Any:
    """The wire has float32."""
    return pytest.approx(expected, rel=2e-5, abs=1e-7)


def surrogate(ratio: Any, a: Any, low: float = 0.2, high: float = 0.2) -> tuple[Any, Any]:
    plain, clipped = ratio * a, np.clip(ratio, 1 - low, 1 + high) * a
    return -np.minimum(plain, clipped), np.where(plain <= clipped, -plain, 0.0)


def differences(objective: Callable[[Any], float]) -> Any:
    """Central differences in each log π."""
    found = []
    for index in range(len(TRAINER)):
        nudge = np.eye(len(TRAINER))[index] * 1e-6
        found.append((objective(TRAINER + nudge) - objective(TRAINER - nudge)) / 2e-6)
    return np.array(found)


def test_the_dual_clip_bounds_what_a_negative_advantage_costs() -> None:
    """The last token has the ratio 5 and A = -2: 3 * 2 instead of 5 * 2, and no gradient."""
    terms, slopes = surrogate(np.exp(TRAINER - INFERENCE), BY_TOKEN)
    assert terms[-1] == pytest.approx(10)
    terms[-1], slopes[-1] = 6, 0
    loss, found = step("ppo_clip", BY_TOKEN, dual_clip=3.0)
    assert loss == approximately(terms.mean())
    assert found == approximately(slopes / 6)


K = np.exp(OLD - INFERENCE)  # 1.3333, .75, .5, 1.3, .4, 6
GEOMETRIC = np.exp([OLD[i == OWNER].mean() - INFERENCE[i == OWNER].mean() for i in range(3)])


@pytest.mark.parametrize(
    ("name", "table", "correction"),
    [
        ("decoupled_ppo", {}, K),
        ("decoupled_ppo", {"max_correction": 1.3}, np.minimum(K, 1.3)),
        ("tis", {}, np.minimum(K, 2)),
        ("icepop", {"min_ratio": 0.45}, np.where((K >= 0.45) & (K <= 5), K, 0)),
        # The geometric means are 1, 0.638 and 6.
        ("geometric_mask", {}, np.where(OWNER == 0, K, 0)),
        ("geometric_mask", {"min_ratio": 0.6}, np.where(OWNER < 2, K, 0)),
        ("geometric_mask", {"max_ratio": 9, "max_correction": 1.2}, [1.2, 0.75, 0, 0, 0, 1.2]),
    ],
)
def test_the_surrogate_around_the_batchs_start_is_corrected_for_the_sampler(
    name: str, table: dict[str, Any], correction: Any
) -> None:
    terms, slopes = surrogate(np.exp(TRAINER - OLD), BY_TOKEN)
    correction = np.array(correction)
    loss, found = step(name, BY_TOKEN, **table)
    assert loss == approximately((correction * terms).mean())
    assert found == approximately(correction * slopes / 6)


def test_the_example_of_the_geometric_mask_has_rollouts_on_both_sides() -> None:
    assert pytest.approx([1.0, 0.26 ** (1 / 3), 6.0]) == GEOMETRIC


def gspo(t: Any, low: float, high: float) -> float:
    terms = []
    for i, a in enumerate((1.0, -0.5, -2.0)):
        ratio = np.prod(np.exp(t - INFERENCE)[i == OWNER]) ** (1 / LENGTHS[i])
        terms.append(-min(ratio * a, float(np.clip(ratio, 1 - low, 1 + high)) * a))
    return float(np.mean(terms))


@pytest.mark.parametrize(("low", "high"), [(3e-4, 4e-4), (0.5, 0.5), (0.05, 0.5)])
def test_gspo_is_the_clipped_ratio_of_the_whole_response(low: float, high: float) -> None:
    loss, slopes = step("gspo", BY_ROLLOUT, clip_eps_low=low, clip_eps_high=high)
    assert loss == approximately(gspo(TRAINER, low, high))
    assert slopes == approximately(differences(lambda t: gspo(t, low, high)))
    assert gspo(TRAINER, 3e-4, 4e-4) == pytest.approx(np.mean([-1.0004, 0.5 * 0.9997, 10]))


def gmpo(t: Any, bound: float) -> float:
    terms = []
    for i, a in enumerate((1.0, -0.5, -2.0)):
        ratio = np.exp(t - INFERENCE)[i == OWNER]
        least = np.minimum(ratio * a, np.clip(ratio, np.exp(-bound), np.exp(bound)) * a)
        terms.append(-np.sign(a) * np.prod(np.abs(least)) ** (1 / LENGTHS[i]))
    return float(np.mean(terms))


@pytest.mark.parametrize("bound", [0.4, 0.2, 3.0])
def test_gmpo_is_the_geometric_mean_of_the_clipped_terms(bound: float) -> None:
    loss, slopes = step("gmpo", BY_ROLLOUT, log_clip=bound)
    assert loss == approximately(gmpo(TRAINER, bound))
    assert slopes == approximately(differences(lambda t: gmpo(t, bound)))


def sapo(t: Any) -> float:
    tau = np.where(BY_TOKEN > 0, 1.0, 1.05)
    ratio = np.exp(t - INFERENCE)
    return float(np.mean(-4 / tau / (1 + np.exp(-tau * (ratio - 1))) * BY_TOKEN))


def test_sapo_is_the_sigmoid_gate() -> None:
    loss, slopes = step("sapo", BY_TOKEN)
    assert loss == approximately(sapo(TRAINER))
    assert slopes == approximately(differences(sapo))


def test_sapo_is_reinforce_on_the_policy() -> None:
    """At r = 1 the gradient is -A / N for both temperatures."""
    _, slopes = step("sapo", BY_TOKEN, trainer=INFERENCE)
    assert slopes == approximately(-BY_TOKEN / 6)


COVARIANCE = (BY_TOKEN - BY_TOKEN.mean()) * (TRAINER - TRAINER.mean())


def test_the_covariances_of_the_example() -> None:
    """mean(A) = -0.25 / 6, mean(t) = -0.83: tokens 0 (1.04 * 0.73) and 4 (-0.96 * -0.37) lead."""
    assert np.argsort(-COVARIANCE)[:2].tolist() == [0, 4]
    assert COVARIANCE[[0, 4]] == pytest.approx([0.80113, 0.31580], abs=1e-5)


@pytest.mark.parametrize(
    ("table", "held"),
    [
        ({}, []),  # none is above 1
        ({"min_covariance": 0.1}, [0]),
        ({"min_covariance": 0.1, "share": 0.4}, [0, 4]),
        ({"min_covariance": 0.1, "max_covariance": 0.5}, [4]),
    ],
)
def test_clip_cov_takes_the_gradient_of_tokens_with_high_covariance(
    table: dict[str, Any], held: list[int]
) -> None:
    terms, slopes = surrogate(np.exp(TRAINER - INFERENCE), BY_TOKEN)
    terms[held], slopes[held] = 0, 0
    loss, found = step("clip_cov", BY_TOKEN, **table)
    assert loss == approximately(terms.mean())
    assert found == approximately(slopes / 6)


@pytest.mark.parametrize(("share", "held"), [(2e-4, [0]), (0.4, [0, 4])])
def test_kl_cov_penalizes_them(share: float, held: list[int]) -> None:
    log_ratio = TRAINER - INFERENCE
    terms = -BY_TOKEN * np.exp(log_ratio)
    slopes = terms.copy()
    terms[held] += 0.5 * np.abs(log_ratio[held])
    slopes[held] += 0.5 * np.sign(log_ratio[held])
    loss, found = step("kl_cov", BY_TOKEN, share=share, beta=0.5)
    assert loss == approximately(terms.mean())
    assert found == approximately(slopes / 6)


@pytest.mark.parametrize("cls", LOSSES, ids=lambda cls: cls.name)
def test_the_checks_of_losses_pass(cls: type[Loss]) -> None:
    report = check_offer("loss", cls, cls.config_class())
    assert report.ok, report


def inputs_of(off: float, gap: float = 0.0) -> LossInputs:
    """The six tokens, and one off the mask with ``off`` in every column; the first token's log μ is
    lower by ``gap``."""

    def column(values: Any) -> torch.Tensor:
        return torch.tensor([*values, off], dtype=torch.float64)

    return LossInputs(
        trainer_logprobs=column(TRAINER).requires_grad_(),
        inference_logprobs=column(INFERENCE - gap * np.eye(6)[0]),
        ref_logprobs=None,
        advantages=column(BY_TOKEN),
        loss_mask=torch.arange(7) < 6,
        loss_weights=column(np.full(6, 0.5)),
        old_logprobs=column(OLD),
    )


@pytest.mark.parametrize("off", [np.inf, -np.inf, np.nan, 1e30])
@pytest.mark.parametrize("name", BY_NAME)
def test_values_off_the_mask_change_nothing(name: str, off: float) -> None:
    cls, found = BY_NAME[name], []
    for value in (0.0, off):
        inputs = inputs_of(value)
        outputs = cls(cls.config_class())(inputs)
        (slopes,) = torch.autograd.grad(outputs.loss, inputs.trainer_logprobs)
        assert slopes[-1] == 0
        found.append([outputs.loss.item(), *slopes.tolist()])
    assert found[0] == found[1]


UNBOUNDED = {"kl_cov", "decoupled_ppo"}
"""By default: without a clip of the ratio, or of the correction."""


@pytest.mark.parametrize("advantage", [2.0, 0.0])
@pytest.mark.parametrize("name", sorted({*BY_NAME} - UNBOUNDED))
def test_a_ratio_that_overflows_gives_no_nan(name: str, advantage: float) -> None:
    cls, inputs = BY_NAME[name], inputs_of(0.0, gap=2000.0)
    inputs = replace(inputs, advantages=torch.where(torch.arange(7) == 0, advantage, 0.0).double())
    outputs = cls(cls.config_class())(inputs)
    (slopes,) = torch.autograd.grad(outputs.loss, inputs.trainer_logprobs)
    assert torch.isfinite(slopes).all() and torch.isfinite(outputs.loss)


@pytest.mark.parametrize(
    ("name", "table", "message"),
    [
        ("ppo_clip", {"dual_clip": 1.0}, "dual_clip: Input should be greater than 1"),
        ("icepop", {"min_ratio": 6}, "min_ratio 6.0 is above max_ratio 5.0: no token would train"),
        ("clip_cov", {"share": 0}, "share: Input should be greater than 0"),
    ],
)
def test_settings_that_train_nothing_are_refused(
    name: str, table: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        settings_of(BY_NAME[name], LOSS, table, "trainer.loss")


def test_another_divisor_of_a_sum_over_rollouts_is_refused() -> None:
    for name in ("gspo", "gmpo"):
        with pytest.raises(ConfigError, match=f"'{name}' is a sum over rollouts"):
            load_losses(losses={name: {"normalize_by": "tokens"}})


def test_bounds_may_be_equal() -> None:
    """A token at a bound trains, so one at both does."""
    table = {"min_ratio": 1.0, "max_ratio": 1.0}
    settings = settings_of(BY_NAME["icepop"], LOSS, table, "trainer.loss")
    assert settings.model_dump() | table == settings.model_dump()
