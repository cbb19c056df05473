"""Generalized advantage estimation of one rollout.

    V_t     = w · h_{t-1} + b        h_{t-1}: the hidden state that predicts token t
    delta_t = r_t + gamma V_{t+1} - V_t
    A_t     = delta_t + gamma lambda A_{t+1}
    R_t     = A_t + V_t

(Schulman et al. 2015, arXiv:1506.02438, equations 11 and 16.) Differences from the paper:

1. The steps are the trainable tokens of a rollout, over all its samples in order. Tokens of the
   environment lie between two steps and take no time.
2. Every rollout ends after its last trainable token, with V = 0 there. With ``bootstrap`` of the
   algorithm, a truncated one ends with V of the state in which it was left, behind the last token
   of its last trainable sample.
3. V and R are those of the weights with which the trainer began the batch, in every minibatch and
   epoch.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
import numpy.typing as npt
from pydantic import Field

from prime_rl import HeadInputs, PluginConfig

Floats = npt.NDArray[np.float64]


class ValueHeadConfig(PluginConfig):
    """Settings of the head ``values``, and of ``value_bins`` besides its own."""

    gamma: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Discount of the reward one token later."""
    gae_lambda: Annotated[float, Field(ge=0, le=1)] = 0.95
    """1: the sampled return minus V, unbiased. Towards 0: less variance, and the critic's bias."""


def credit(
    inputs: HeadInputs, values: npt.ArrayLike, ends: npt.ArrayLike | None, config: ValueHeadConfig
) -> dict[str, Floats]:
    """``advantages``, ``returns`` and ``old_values`` of one rollout, [T] each; 0.0 off its
    trainable tokens. ``values`` [T]; ``ends`` [S] behind the last token of each sample."""
    mask = inputs.loss_mask
    old = np.where(mask, values, 0.0)
    last = 0.0
    if ends is not None and inputs.streams["truncated"][mask].any():
        samples = np.repeat(np.arange(len(inputs.lengths)), inputs.lengths)
        last = float(np.asarray(ends)[samples[mask][-1]])

    advantages = np.zeros(len(mask))
    advantages[mask] = gae(
        inputs.streams["rewards"][mask],
        old[mask],
        gamma=config.gamma,
        gae_lambda=config.gae_lambda,
        last=last,
    )
    return {"advantages": advantages, "old_values": old, "returns": advantages + old}


def gae(
    rewards: npt.ArrayLike,
    values: npt.ArrayLike,
    gamma: float,
    gae_lambda: float,
    last: float = 0.0,
) -> Floats:
    """The advantage of each step of one episode, [C]; ``rewards`` and ``values`` [C]. ``last``: V
    of the state in which a truncated episode was left."""
    r = np.asarray(rewards, np.float64)
    v = np.asarray(values, np.float64)
    advantages = r + gamma * np.append(v[1:], last)[: len(v)] - v
    for t in reversed(range(len(v) - 1)):
        advantages[t] += gamma * gae_lambda * advantages[t + 1]
    return advantages
