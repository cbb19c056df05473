"""ECHO: GRPO, and a cross-entropy loss on what the environment answered (arXiv:2605.24517).

    L = L_GRPO(sampled tokens) + sum_t alpha[role(t)] (-log pi(t)) / N_ce     t in the observations

An observation is a token of a message that no model sampled, after the branch's first sampled
token, of a role that is in ``roles``, on the message's body where the renderer tells body from
scaffold, and kept by ``filter`` if there is one. So the initial prompt is never trained. alpha is
the paper's lambda.

A rollout whose advantage is 0 trains by its observations alone: core takes it out of the tokens
that L_GRPO is divided by (``stamp``), as grpo's filter ``zero_advantage`` drops it.

Changed from the paper: 1. N_ce is the number of such tokens in the whole optimizer step, not in
one rollout: every observed token counts alike; 2. the paper trains terminal output alone, we any
role of the table, each at its own weight; 3. the paper leaves warning lines out, we only if
``filter`` says so; 4. an observation that reaches the policy in a re-rendered prompt, so that it
starts a new branch, counts as that branch's initial prompt.
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
                "role of their message, and a sample has no roles. Choose a renderer that gives "
                "attribution (orchestrator.renderer.name), or a source whose samples carry roles."
            )
        messages = _messages(sample)
        observed = np.logical_or.accumulate(sampled) & ~np.isin(messages, messages[sampled])
        if sample.is_content is not None:
            observed &= sample.is_content
        return np.where(observed, self.alphas[sample.roles], np.float32(0.0))


def _messages(sample: Sample) -> npt.NDArray[np.integer]:
    """Which message each token belongs to, [T]. A message with a sampled token is an action: what
    the template wrote around it (the generation prompt) is no observation.

    Without ``node_ids``, each run of tokens of one role counts as a message. With ``is_content``,
    which leaves out the template's own tokens, each token does.
    """
    if sample.node_ids is not None:
        return sample.node_ids
    if sample.is_content is not None or sample.roles is None:
        return np.arange(len(sample))
    return np.cumsum(np.diff(sample.roles, prepend=sample.roles[:1]) != 0)


def _move_to_trained(rollout: Rollout, weights: Sequence[FloatColumn]) -> None:
    """Give a shared token the largest of its weights, in the sample that trains it; in place."""
    for later, earlier, length in reversed([*rollout.shared_prefixes]):
        ours, theirs = weights[later][:length], weights[earlier][:length]
        np.maximum(ours, theirs, out=theirs)
        ours[:] = 0.0
