"""OPD: on-policy distillation, the reverse KL to a teacher on the policy's own samples (Thinking
Machines, "On-Policy Distillation", 2025; GKD, arXiv:2306.13649).

    y ~ pi(. | x)        g_t = log teacher(y_t | x, y_<t) - log pi(y_t | x, y_<t)

on every token that the policy sampled. Its expectation is -KL(pi || teacher). The orchestrator
sends the teacher's logprobs; the trainer uses g_t as a constant advantage with an importance ratio
(component ``ref_kl``). It needs no reward and no siblings: any ``group_size``.

With ``top_k``, the signal is the KL between the two distributions in the place of each sampled
token, over the teacher's ``top_k`` likeliest tokens and one bucket for all others (component
``top_kl``, whose ``direction`` is forward by default)::

    D_t = KL(teacher(. | x, y_<t) || pi(. | x, y_<t))

It has no variance from the choice of y_t, and sends 8 ``top_k`` bytes per token.

Changed from the source: 1. pi in g is the current policy, not the one that sampled; 2. a token
whose probability has fallen by more than 0.2 is dropped; 3. the teacher is scored at temperature 1,
the policy at its sampling temperature: at 0.7, the policy sampled at 0.7 converges to the teacher
at 1.
"""

from __future__ import annotations

from typing import Any

from pydantic import PositiveInt, field_validator

from prime_rl import Algorithm, FrozenModel, Host, PluginConfig, ReferenceModel, Rollout, hookimpl
from prime_rl_distill.scoring import sampled_logprobs, sampled_top_logprobs


class OPDConfig(PluginConfig):
    """Settings of ``opd``."""

    teacher: FrozenModel
    """The model to learn from: ``name`` and ``base_url``. It must have the policy's tokenizer."""
    top_k: PositiveInt | None = None
    """Learn from the teacher's logprobs of its ``top_k`` likeliest tokens in each place; it must
    offer as many. None: from its logprob of the sampled token."""

    @field_validator("teacher", mode="before")
    @classmethod
    def _is_not_the_policy(cls, value: Any) -> Any:
        if value == "policy":
            raise ValueError(
                "the policy cannot be its own teacher: the KL would be zero everywhere. Give a "
                "frozen model (name and base_url), or use the algorithm opsd, in which the policy "
                "learns from itself conditioned on a demonstration"
            )
        return value


class OPD(Algorithm):
    """The signal is the teacher's logprob of each token minus the policy's, or the KL over its
    likeliest tokens."""

    name = "opd"
    config_class = OPDConfig
    config: OPDConfig
    action_loss = "ref_kl"

    def __init__(self, config: PluginConfig) -> None:
        super().__init__(config)
        if self.config.top_k is not None:
            self.action_loss = "top_kl"

    def objective(self, outcomes: Any) -> Any:
        """Minus the KL between policy and teacher in the states that the policy visits."""
        forward = self.config.top_k is not None
        divergence = outcomes.forward_kl if forward else outcomes.reverse_kl
        return -(outcomes.visits * divergence).sum()

    async def setup(self, host: Host) -> None:
        self.teacher: ReferenceModel = host.connect(self.config.teacher)

    @hookimpl
    async def score_rollout(self, rollout: Rollout) -> None:
        """Score the sampled tokens, or their places, with the teacher."""
        if self.config.top_k is None:
            rollout.assign_ref_logprobs(await sampled_logprobs(self.teacher, rollout))
            return
        ids, logprobs = await sampled_top_logprobs(self.teacher, rollout, self.config.top_k)
        rollout.assign_stream("top_ids", ids)
        rollout.assign_stream("top_ref_logprobs", logprobs)
