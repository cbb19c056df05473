"""Metrics of the losses for one rollout, computed manually. Its last token does not train."""

from __future__ import annotations

from math import exp, log
from typing import Any

import pytest
import torch

from prime_rl import LossInputs, TokenMetric
from prime_rl_clip_losses import LOSSES

BY_NAME = {cls.name: cls for cls in LOSSES}
MASK = [True, True, True, False]


def metrics(name: str, trainer: Any, inference: Any, advantages: Any, **table: Any) -> Any:
    """The values of each metric on the member tokens. The batch began at ``inference`` times 2."""
    cls = BY_NAME[name]
    mu = torch.tensor(inference, dtype=torch.float64)
    inputs = LossInputs(
        trainer_logprobs=torch.tensor(trainer, dtype=torch.float64).log().requires_grad_(),
        inference_logprobs=mu.log(),
        old_logprobs=(2 * mu).log(),
        ref_logprobs=None,
        advantages=torch.tensor(advantages, dtype=torch.float64),
        loss_mask=torch.tensor(MASK),
        loss_weights=None,
    )
    found = {}
    for key, metric in cls(cls.config_class(**table))(inputs).metrics.items():
        assert isinstance(metric, TokenMetric)
        found[key] = pytest.approx(metric.values[metric.mask].tolist())
    return found


@pytest.mark.parametrize(
    ("name", "table", "correction", "dropped"),
    [
        ("icepop", {"max_ratio": 1.9}, [0, 0, 0], [1, 1, 1]),  # k is 2 everywhere
        ("icepop", {"max_ratio": 2.1}, [2, 2, 2], [0, 0, 0]),
        ("tis", {"max_correction": 1.5}, [1.5, 1.5, 1.5], [0, 0, 0]),
        ("geometric_mask", {}, [0, 0, 0], [1, 1, 1]),
    ],
)
def test_a_dropped_token_is_reported_as_one(
    name: str, table: dict[str, float], correction: list[float], dropped: list[float]
) -> None:
    found = metrics(name, [0.2] * 4, [0.1] * 4, [1.0] * 4, **table)
    assert (found["correction"], found["is_dropped"]) == (correction, dropped)


def test_gspo_reports_the_geometric_mean_of_the_ratios() -> None:
    # Ratios 4, 2 and 1: their geometric mean is 2. The fourth token does not train.
    found = metrics("gspo", [0.8, 0.4, 0.2, 0.9], [0.2, 0.2, 0.2, 0.1], [1.0, 1.0, 1.0, 1.0])
    assert found["sequence_ratio"] == [2, 2, 2]


def test_gmpo_reports_on_which_side_a_token_stops_and_the_mean_of_the_clipped_ratios() -> None:
    # Logarithms of the ratios: 2 log 2 (stops above), -log 2 (stops below), log 2 in the direction
    # against its advantage (trains on).
    found = metrics(
        "gmpo",
        [0.4, 0.1, 0.4, 0.9],
        [0.1, 0.2, 0.2, 0.1],
        [1.0, -1.0, -1.0, 1.0],
        log_clip=0.4,
    )
    assert found["is_masked"] == [1, 1, 0]
    assert found["is_masked_low"] == [0, 1, 0]
    assert found["is_masked_high"] == [1, 0, 0]
    assert found["sequence_ratio"] == [exp((0.4 - 0.4 + log(2)) / 3)] * 3
