"""No value off the mask, and no ratio of a dropped token, reaches loss or gradient."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prime_rl import LossInputs, PluginConfig
from prime_rl_losses.distill import CrossEntropy, ReferenceKL

LOSSES = {"ce": CrossEntropy(PluginConfig()), "ref_kl": ReferenceKL(PluginConfig())}
JUNK = st.sampled_from([np.inf, -np.inf, np.nan, 1e30, -1e30, -3e3, 3e3, 0.0, -1.0])
COLUMNS = ("trainer_logprobs", "inference_logprobs", "ref_logprobs", "advantages", "loss_weights")


@st.composite
def inputs_and_junk(draw: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Ordinary columns, zero off the mask; and the same with junk there."""
    size = draw(st.integers(1, 6))
    mask = np.array(draw(st.lists(st.booleans(), min_size=size, max_size=size)))
    clean, dirty = {"loss_mask": mask}, {"loss_mask": mask}
    for name in COLUMNS:
        values = np.array(draw(st.lists(st.floats(-5, -0.01), min_size=size, max_size=size)))
        junk = np.array(draw(st.lists(JUNK, min_size=size, max_size=size)))
        clean[name] = np.where(mask, values, 0.0)
        dirty[name] = np.where(mask, values, junk)
    return clean, dirty


def outcome(loss: Any, columns: dict[str, Any]) -> tuple[float, list[float]]:
    tensors = {name: torch.tensor(column) for name, column in columns.items()}
    leaf = tensors["trainer_logprobs"].requires_grad_()
    result = loss(LossInputs(**tensors)).loss
    (gradient,) = torch.autograd.grad(result, leaf)
    return float(result.detach()), gradient.tolist()


@pytest.mark.parametrize("name", LOSSES)
@given(columns=inputs_and_junk())
@settings(deadline=None)
def test_what_stands_off_the_mask_changes_nothing(name: str, columns: Any) -> None:
    clean, dirty = (outcome(LOSSES[name], each) for each in columns)
    assert dirty[0] == pytest.approx(clean[0])
    assert dirty[1] == pytest.approx(clean[1])
    assert np.isfinite(clean[1]).all()


@given(st.floats(50, 1e4), st.floats(-0.2, -1e-3))
@settings(deadline=None)
def test_a_token_that_ref_kl_drops_trains_by_the_penalty_alone(gap: float, mu: float) -> None:
    columns = {
        "trainer_logprobs": [mu - gap, -1.0],
        "inference_logprobs": [mu, -1.0],
        "ref_logprobs": [-1e30, -2.0],
        "advantages": [np.nan] * 2,
        "loss_mask": [True, True],
        "loss_weights": [1.0, 1.0],
    }
    value, gradient = outcome(ReferenceKL(PluginConfig()), columns)
    assert value == pytest.approx(1e-3 * gap**2 + 1)  # the other: -(ref - t) * 1
    assert gradient == pytest.approx([-2e-3 * gap, 1.0])
