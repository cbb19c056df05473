"""ECHO: GRPO, and a cross-entropy loss on the environment's responses (arXiv:2605.24517).

    L = L_GRPO(sampled tokens) + sum_t alpha[role(t)] (-log pi(t)) / N_ce     t in the observations

An observation is a token of a message that no model sampled, after the branch's first sampled
token, of a role in ``roles``, in the message's body if the renderer separates body and template,
and kept by ``filter`` if there is one. So the initial prompt is never trained. alpha is the paper's
lambda.

A rollout whose advantage is 0 trains only with its observations: core excludes its tokens from the
count that divides L_GRPO (``stamp``), just as grpo's filter ``zero_advantage`` drops the rollout.

Changed from the paper: 1. N_ce is the number of observations in the whole optimizer step, not in
one rollout, so every observed token has the same weight; 2. the paper trains only terminal output,
we train any role of the table with its own weight; 3. the paper excludes warning lines, we do so
only with a ``filter``; 4. an observation that reaches the policy in a re-rendered prompt starts a
new branch and counts as that branch's initial prompt.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from prime_rl import PluginConfig, Rollout, Sample, StreamError, hookimpl
from prime_rl_echo.filter import BoolColumn, TokenFilter
from prime_rl_echo.roles import RoleWeight, RoleWeights
from prime_rl_grpo import GRPO, GRPOConfig

FloatColumn = npt.NDArray[np.float32]


class EchoConfig(GRPOConfig):
    """Settings of ``echo``, besides those of ``grpo``."""

    roles: RoleWeights = RoleWeights(tool=RoleWeight(alpha=0.1))
    """Message roles to train on (``system``, ``user``, ``assistant``, ``tool``), each a table with
    its weight ``alpha`` > 0. Setting any role replaces the whole table."""
    filter: TokenFilter | None = None
    """A function that restricts the selection: ``import_path`` (``module.function``) and
    ``kwargs``. ``function(rollout, **kwargs)`` returns one list of booleans per sample, one per
    token. Tokens with False are not trained."""


class Echo(GRPO):
    """GRPO's credit, and ce weights on the environment's responses."""

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
        """Alpha on every observed token, 0.0 elsewhere: [T] per sample, None if all are 0.0."""
        pairs = zip(rollout.samples, rollout.sampled_paths, strict=True)
        weights = [self._weights(rollout, sample, sampled) for sample, (sampled, _) in pairs]
        if self.filter is not None:
            weights = [w * keep for w, keep in zip(weights, self.filter(rollout), strict=True)]
        _move_to_trained(rollout, weights)
        return [column if column.any() else None for column in weights]

    def _weights(self, rollout: Rollout, sample: Sample, sampled: BoolColumn) -> FloatColumn:
        if sample.roles is None:
            raise StreamError(
                f"env {rollout.env!r}, group {rollout.group_id}: algo 'echo' selects tokens by the "
                "role of their message, but a sample has no roles. Choose a renderer with "
                "attribution (orchestrator.renderer.name), or a source whose samples have roles."
            )

        messages = _messages(sample)
        observed = np.logical_or.accumulate(sampled) & ~np.isin(messages, messages[sampled])
        if sample.is_content is not None:
            observed &= sample.is_content
        return np.where(observed, self.alphas[sample.roles], np.float32(0.0))


def _messages(sample: Sample) -> npt.NDArray[np.integer]:
    """The message of each token, [T]. A message with a sampled token is an action, so the template
    around it (the generation prompt) is not an observation.

    Without ``node_ids``, each run of tokens of one role counts as a message. With ``is_content``,
    which already excludes the template's tokens, each token does.
    """
    if sample.node_ids is not None:
        return sample.node_ids
    if sample.is_content is not None or sample.roles is None:
        return np.arange(len(sample))
    return np.cumsum(np.diff(sample.roles, prepend=sample.roles[:1]) != 0)


def _move_to_trained(rollout: Rollout, weights: Sequence[FloatColumn]) -> None:
    """Move the largest weight of a shared token to the sample that trains it, in place."""
    for later, earlier, length in reversed([*rollout.shared_prefixes]):
        ours = weights[later][:length]
        theirs = weights[earlier][:length]
        np.maximum(ours, theirs, out=theirs)
        ours[:] = 0.0
