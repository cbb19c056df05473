"""SDPO: self-distillation from a slow copy of the policy that has seen a sibling's success
(Hübotter et al. 2026, "Reinforcement Learning via Self-Distillation", arXiv:2601.20802).

    y_1 .. y_G ~ pi(. | x)        g_t = log e(y_t | d, x, y_<t) - log pi(y_t | x, y_<t)

with d the first successful reply of another member of y's group. A rollout without a successful
sibling trains nothing. The teacher e and the component are those of ``sdft``.

Changed from the paper: 1. g is the estimate of the reverse KL from the sampled token, without a sum
over the likeliest tokens; 2. the only feedback is a sibling's reply, no text of the environment; 3.
it stands in a system message before the prompt; 4. a truncated rollout is skipped. The objective
was checked in descriptions of the paper, not in the paper.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Literal

from pydantic import AfterValidator

from prime_rl import (
    Algorithm,
    Group,
    Host,
    OverlongError,
    PluginConfig,
    Rollout,
    at_least,
    hookimpl,
)
from prime_rl_distill.demonstrations import TEMPLATE, check_template
from prime_rl_distill.opsd import skip
from prime_rl_distill.scoring import sampled_logprobs


class SDPOConfig(PluginConfig):
    """Settings of ``sdpo``."""

    reference: Literal["ema", "initial"] = "ema"
    """The teacher's weights: the moving average of the policy's (``trainer.ema_decay``), or those
    that the run began with."""
    min_reward: float = 1.0
    """A reply with at least this reward is a success."""
    template: Annotated[str, AfterValidator(check_template)] = TEMPLATE
    """The system message. ``{demonstration}`` is replaced by the sibling's reply."""
    skip_truncated: bool = True
    """Do not train on truncated rollouts."""


class SDPO(Algorithm):
    """The signal is the teacher's logprob of each token, given a sibling's success, minus the
    policy's."""

    name = "sdpo"
    config_class = SDPOConfig
    config: SDPOConfig
    action_loss = "ref_kl"
    group_relative = True
    needs_temperature = 1.0  # as opsd
    # Minus the KL to the teacher, but each question counts as often as a sibling succeeds, which
    # changes with the policy: the gradient of no objective.
    objective = "none"

    def __init__(self, config: PluginConfig) -> None:
        super().__init__(config)
        self.needs_ema = self.config.reference == "ema"
        self.needs_initial = not self.needs_ema

    async def setup(self, host: Host) -> None:
        self.host = host
        self.teacher = host.ema if self.needs_ema else host.initial

    @hookimpl
    async def score_group(self, group: Group) -> None:
        """Score each rollout that has a successful sibling."""
        good = [each for each in group if at_least(each.reward, self.config.min_reward)]
        await asyncio.gather(
            *(self._score(each, next((g for g in good if g is not each), None)) for each in group)
        )

    async def _score(self, rollout: Rollout, sibling: Rollout | None) -> None:
        if sibling is None or (self.config.skip_truncated and rollout.is_truncated):
            return skip(rollout)
        last = sibling.samples[-1]
        reply = self.host.decode(last.token_ids[last.loss_mask])
        content = self.config.template.format(demonstration=reply)
        hint = self.host.render([{"role": "system", "content": content}])
        try:
            rollout.assign_ref_logprobs(await sampled_logprobs(self.teacher, rollout, hint))
        except OverlongError:  # with the reply it exceeds the context
            rollout.metrics["sdpo_overlong"] = 1.0
            skip(rollout)
