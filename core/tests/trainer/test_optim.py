"""Learning rates, clipping and AdamW's step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from prime_rl import AdamWConfig, ConfigError
from prime_rl.config.trainer import SchedulerConfig
from prime_rl.plugins.trainer import AdamWMaker
from prime_rl.trainer.optim import build_optimizer, clip_gradients, make_schedule


def rates(max_steps: int, peak: float = 1.0, **settings: Any) -> list[float]:
    """The learning rate of every step."""
    schedule = make_schedule(SchedulerConfig(**settings), peak, max_steps)
    return [schedule(step) for step in range(1, max_steps + 1)]


def test_constant_warms_up_and_stays() -> None:
    assert rates(4, type="constant") == [1, 1, 1, 1]
    assert rates(6, type="constant", warmup_steps=4) == [0.25, 0.5, 0.75, 1, 1, 1]


def test_linear_warms_up_holds_and_decays() -> None:
    found = rates(8, type="linear", warmup_steps=2, decay_steps=4)
    assert found == pytest.approx([0.5, 1, 1, 1, 1, 0.75, 0.5, 0.25])


def test_linear_without_decay_steps_decays_all_the_way_to_min_lr() -> None:
    found = rates(5, peak=2.0, type="linear", warmup_steps=1, min_lr=1.0)
    assert found == pytest.approx([2, 2, 1.75, 1.5, 1.25])  # 1.0 after the last step


def test_cosine_decays_by_half_a_wave() -> None:
    found = rates(5, type="cosine", warmup_steps=1, min_lr=0.2)
    # (1 + cos(0, 45, 90, 135 degrees)) / 2 of the way from 0.2 to 1
    expected = [1, 1, 0.2 + 0.8 * 0.853553, 0.6, 0.2 + 0.8 * 0.146447]
    assert found == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
def test_no_step_has_a_rate_of_zero(kind: str) -> None:
    assert min(rates(7, type=kind, warmup_steps=3)) > 0


def test_a_schedule_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match="take 9 steps, max_steps is 8"):
        rates(8, type="linear", warmup_steps=5, decay_steps=4)
    with pytest.raises(ConfigError, match=r"min_lr is 2\.0, expected at most optim\.lr 1\.0"):
        rates(8, type="cosine", min_lr=2.0)


@pytest.mark.parametrize(
    ("table", "steps", "expected"),
    [
        ({"type": "linear", "warmup_steps": 10}, 6, [1 / 3, 2 / 3, 1, 1, 2 / 3, 1 / 3]),
        ({"type": "linear", "warmup_steps": 10, "decay_steps": 20}, 6, None),
        ({"type": "cosine", "warmup_steps": 10}, 6, None),
        ({"type": "constant", "warmup_steps": 10}, 6, [1 / 3, 2 / 3, 1, 1, 1, 1]),
        ({"type": "constant", "warmup_steps": 1}, 1, None),
        ({"type": "linear", "warmup_steps": 3, "decay_steps": 2}, 1, None),
    ],
)
def test_a_schedule_is_shortened_to_a_short_run(
    table: dict[str, Any], steps: int, expected: list[float] | None
) -> None:
    given = SchedulerConfig(**table)
    found = given.fitted(steps)
    found.check(1.0, steps)
    schedule = make_schedule(found, 1.0, steps)
    rates = [schedule(step) for step in range(1, steps + 1)]
    assert min(rates) > 0 and max(rates) <= 1
    if expected is not None:
        assert rates == pytest.approx(expected)
    assert given.fitted(40) is given


def with_gradient(*values: float) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros(len(values)))
    parameter.grad = torch.tensor(values)
    return parameter


def test_clipping_scales_all_gradients_and_reports_the_norm_before() -> None:
    first, second = with_gradient(3.0, 0.0), with_gradient(4.0)
    assert float(clip_gradients([first, second], 1.0)) == pytest.approx(5)
    assert first.grad is not None and second.grad is not None
    assert [*first.grad.tolist(), *second.grad.tolist()] == pytest.approx([0.6, 0, 0.8], abs=1e-5)


def test_without_max_norm_nothing_is_clipped_and_the_norm_is_reported() -> None:
    parameter = with_gradient(3.0, 4.0)
    assert float(clip_gradients([parameter], None)) == pytest.approx(5)
    assert parameter.grad is not None
    assert parameter.grad.tolist() == [3, 4]


def test_adamw_takes_its_first_step_by_hand() -> None:
    """m / (sqrt(v) + eps) = sign(g) at first, so p <- p * (1 - lr * wd) - lr * sign(g)."""
    parameter = nn.Parameter(torch.tensor([2.0, 2.0]))
    frozen = nn.Parameter(torch.ones(1), requires_grad=False)
    parameters = nn.ParameterList([parameter, frozen])
    optimizer = build_optimizer(AdamWMaker(AdamWConfig()), parameters, 0.1, 0.5)
    parameter.grad = torch.tensor([3.0, -0.01])
    optimizer.step()
    assert parameter.tolist() == pytest.approx([1.9 - 0.1, 1.9 + 0.1], abs=1e-5)
    assert sum(len(group["params"]) for group in optimizer.param_groups) == 1
