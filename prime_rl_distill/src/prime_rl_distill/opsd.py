"""OPSD: self-distillation from the policy with a demonstration in its context (SDFT,
arXiv:2601.19897).

    y ~ pi(. | x)        g_t = log pi(y_t | d, x, y_<t) - log pi(y_t | x, y_<t)

on the tokens that the policy sampled: the reverse KL to the policy that has seen the demonstration
d (component ``ref_kl``). The reference is the live policy, so no other model is needed. d precedes
the sample as a system message; the sample's own tokens follow verbatim.

Changed from the paper: 1. a reference that is trained with the policy drifts, and nothing pulls it
back: without a gate, the run ends in endless replies. So an example trains only while d still helps
with the expert's own reply e to the rollout's first prompt::

    gain = mean_t [log pi(e_t | d, x, e_<t) - log pi(e_t | x, e_<t)] > min_gain

The gate closes once the policy has learned d, or d no longer helps, and opens again if the policy
gets worse; 2. a truncated rollout is skipped: it has states that no expert reaches, for which d is
no reference, and no end to learn; 3. pi in g is the current policy, and a token whose probability
has fallen by more than 0.2 is dropped.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import numpy as np
from pydantic import AfterValidator

from prime_rl import Algorithm, Host, OverlongError, PluginConfig, Rollout, hookimpl
from prime_rl_distill.demonstrations import TEMPLATE, check_template, demonstration_of
from prime_rl_distill.scoring import sampled_logprobs


class OPSDConfig(PluginConfig):
    """Settings of ``opsd``."""

    demo_key: str = "demonstration"
    """The key of the expert's response in the rollout's info, else in the example."""
    template: Annotated[str, AfterValidator(check_template)] = TEMPLATE
    """The system message. ``{demonstration}`` is replaced by the expert's response."""
    renderer: str | None = None
    """Name of the renderer of the system message. None: the run's."""
    skip_truncated: bool = True
    """Do not train on truncated rollouts."""
    min_gain: float | None = 0.2
    """Train on an example only while the demonstration raises the logprob of the expert's own reply
    by more than this, in nats per token. None: always, which fails in long runs."""


class OPSD(Algorithm):
    """The signal is how much the demonstration raises the policy's logprob of each token."""

    name = "opsd"
    config_class = OPSDConfig
    config: OPSDConfig
    action_loss = "ref_kl"
    # The reference is scored at 1. With a policy at another temperature, every token would have a
    # signal even without a demonstration, and the policy would follow it.
    needs_temperature = 1.0

    def objective(self, outcomes: Any) -> Any:
        """Minus the KL from the policy to itself with the demonstration, in the states that it
        visits. With ``skip_truncated``, the estimate leaves out the rollouts that do not end."""
        return -(outcomes.visits * outcomes.reverse_kl).sum()

    async def setup(self, host: Host) -> None:
        self.host = host
        self.reference = host.policy

    @hookimpl
    async def score_rollout(self, rollout: Rollout) -> None:
        """Score the sampled tokens with the policy that has seen the demonstration."""
        if self.config.skip_truncated and rollout.is_truncated:
            return skip(rollout)
        demonstration = demonstration_of(rollout, self.config.demo_key)
        message = {
            "role": "system",
            "content": self.config.template.format(demonstration=demonstration),
        }
        hint = self.host.render([message], renderer=self.config.renderer)
        try:
            await self._score(rollout, demonstration, hint)
        except OverlongError:  # with the demonstration it exceeds the context
            rollout.metrics[f"{self.name}_overlong"] = 1.0
            skip(rollout)

    async def _score(self, rollout: Rollout, demonstration: str, hint: list[int]) -> None:
        if self.config.min_gain is not None:
            gain = await self.gain(rollout, demonstration, hint)
            rollout.metrics[f"{self.name}_gain"] = gain
            if gain <= self.config.min_gain:
                return skip(rollout)
        rollout.assign_ref_logprobs(await sampled_logprobs(self.reference, rollout, hint))

    async def gain(self, rollout: Rollout, demonstration: str, hint: list[int]) -> float:
        """Nats per token by which the hint raises the logprob of the expert's reply to the first
        prompt."""
        first = rollout.samples[0]
        prompt = first.token_ids[: int(first.loss_mask.argmax())]
        turn = [{"role": "user", "content": ""}, {"role": "assistant", "content": demonstration}]
        expert = self.host.supervised_sample(turn)
        reply = expert.token_ids[expert.loss_mask]  # as the policy would have sampled it
        shown, plain = await asyncio.gather(
            self.reference.logprobs([*hint, *prompt, *reply], group_id=rollout.group_id),
            self.host.policy.logprobs([*prompt, *reply], group_id=rollout.group_id),
        )
        return float(np.mean(shown[-len(reply) :] - plain[-len(reply) :]))


def skip(rollout: Rollout) -> None:
    """Train no token. The batch gets another rollout instead."""
    rollout.assign_weights("ref_kl", np.zeros(rollout.num_tokens))
    rollout.assign_ref_logprobs(np.zeros(rollout.num_tokens))
