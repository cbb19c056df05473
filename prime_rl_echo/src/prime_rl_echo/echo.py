"""ECHO: GRPO, and a cross-entropy loss on what the environment answered (arXiv:2605.24517).

    L = L_GRPO(sampled tokens) + sum_t alpha[role(t)] (-log pi(t)) / N_ce     t in the observations

An observation is a token that no model sampled, after the branch's first sampled token, of a
message whose role is in ``roles``, on the message's body where the renderer tells body from
scaffold, and kept by ``filter`` if there is one. So the initial prompt is never trained. alpha is
the paper's lambda.

Changed from the paper: 1. N_ce is the number of such tokens in the whole optimizer step, not in
one rollout: every observed token counts alike; 2. the paper trains terminal output alone, we any
role of the table, each at its own weight; 3. the paper leaves warning lines out, we only if
``filter`` says so; 4. an observation that reaches the policy in a re-rendered prompt, so that it
starts a new branch, counts as that branch's initial prompt.
"""

from __future__ import annotations

import numpy as np

from prime_rl import PluginConfig, Rollout, Sample, StreamError, hookimpl
from prime_rl_echo.branches import (
    BoolColumn,
    FloatColumn,
    generation_prompts,
    move_to_trained,
    sampled_tokens,
)
from prime_rl_echo.filter import TokenFilter
from prime_rl_echo.roles import ASSISTANT, RoleWeight, RoleWeights
from prime_rl_grpo import GRPO, GRPOConfig


class EchoConfig(GRPOConfig):
    """Settings of ``echo``, besides those of ``grpo``."""

    roles: RoleWeights = RoleWeights(tool=RoleWeight(alpha=0.1))
    """Message roles to train on (``system``, ``user``, ``assistant``, ``tool``), each a table with
    its weight ``alpha`` > 0. Setting any role replaces the whole table."""
    filter: TokenFilter | None = None
    """A function that narrows the selection: ``import_path`` (``module.function``) and ``kwargs``.
    It is called as ``function(rollout, **kwargs)`` and gives one list of booleans per sample, one
    per token; False is never trained."""


class Echo(GRPO):
    """GRPO's credit, and a ce weight on what the environment answered."""

    name = "echo"
    config_class = EchoConfig
    config: EchoConfig
    needs_attribution = True

    def __init__(self, config: PluginConfig) -> None:
        super().__init__(config)
        self.alphas = self.config.roles.column()
        self.filter = self.config.filter.bound() if self.config.filter else None

    @hookimpl
    def observation_weights(self, rollout: Rollout) -> list[FloatColumn | None]:
        """Alpha on every observed token, 0.0 elsewhere: [T] per sample, None where all is 0.0."""
        sampled = sampled_tokens(rollout.samples)
        pairs = zip(rollout.samples, sampled, strict=True)
        weights = [self._weights(rollout, sample, ours) for sample, ours in pairs]
        if self.filter is not None:
            weights = [w * keep for w, keep in zip(weights, self.filter(rollout), strict=True)]
        move_to_trained(rollout.samples, weights)
        return [column if column.any() else None for column in weights]

    def _weights(self, rollout: Rollout, sample: Sample, sampled: BoolColumn) -> FloatColumn:
        if sample.roles is None:
            raise StreamError(
                f"env {rollout.env!r}, group {rollout.group_id}: algo 'echo' selects tokens by the "
                "role of their message, and a sample has no roles. Choose a renderer that gives "
                "attribution (orchestrator.renderer.name), or a source whose samples carry roles."
            )
        body = sample.is_content
        if body is None:
            body = ~generation_prompts(sampled, sample.roles == ASSISTANT)
        observed = np.logical_or.accumulate(sampled) & ~sampled & body
        return np.where(observed, self.alphas[sample.roles], np.float32(0.0))
