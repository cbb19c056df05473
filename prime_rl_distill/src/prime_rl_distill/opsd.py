"""OPSD: the policy distils itself, shown an expert's demonstration (SDFT, arXiv:2601.19897).

    y ~ pi(. | x)        g_t = log pi(y_t | d, x, y_<t) - log pi(y_t | x, y_<t)

on the tokens the policy sampled: the reverse KL to what it would do had it seen the demonstration d
(component ``ref_kl``). The reference is the live policy, so there is no model to name. d goes in
front as a system message; the sample's own tokens follow it verbatim.

Changed from the paper: 1. a reference that is trained along drifts, and nothing pulls it back: left
alone, the run ends in replies without end. So an example trains only while d still teaches
something, measured on the expert's own reply e to the rollout's first prompt::

    gain = mean_t [log pi(e_t | d, x, e_<t) - log pi(e_t | x, e_<t)] > min_gain

It closes once the policy has learnt what d shows, or d no longer helps it, and opens again when the
policy falls behind; 2. a truncated rollout is left out: it shows states that no expert reaches,
which the reference knows nothing of, and has no end to learn; 3. pi in g is the policy that is
trained now, and a token that has become less likely by more than 0.2 is left out.
"""

from __future__ import annotations

import asyncio
from typing import Annotated

import numpy as np
from pydantic import AfterValidator

from prime_rl import Algorithm, Host, OverlongError, PluginConfig, Rollout, hookimpl
from prime_rl_distill.demonstrations import TEMPLATE, check_template, demonstration_of
from prime_rl_distill.scoring import sampled_logprobs


class OPSDConfig(PluginConfig):
    """Settings of ``opsd``."""

    demo_key: str = "demonstration"
    """Where the expert's response is: this key of the rollout's info, else of the example."""
    template: Annotated[str, AfterValidator(check_template)] = TEMPLATE
    """The system message; ``{demonstration}`` stands for the expert's response."""
    renderer: str | None = None
    """Renderer of the system message, by name. None: the run's."""
    skip_truncated: bool = True
    """Leave out rollouts that were cut off before they came to an end."""
    min_gain: float | None = 0.2
    """Train on an example only where the demonstration makes the expert's own reply likelier by
    more than this, in nats a token. None: always, and do not run it for long."""


class OPSD(Algorithm):
    """The signal is how much likelier a token becomes to the policy that has seen an expert."""

    name = "opsd"
    config_class = OPSDConfig
    config: OPSDConfig
    action_loss = "ref_kl"
    # The reference is scored at 1. Beside a policy at another one every token would have a signal
    # though the demonstration says nothing, and the policy would run after it.
    needs_temperature = 1.0

    async def setup(self, host: Host) -> None:
        """Keep what renders and scores."""
        self.host = host

    @hookimpl
    async def score_rollout(self, rollout: Rollout) -> None:
        """Score what the policy sampled under the policy that has seen the demonstration."""
        if self.config.skip_truncated and rollout.is_truncated:
            return _leave_out(rollout)
        demonstration = demonstration_of(rollout, self.config.demo_key)
        message = {
            "role": "system",
            "content": self.config.template.format(demonstration=demonstration),
        }
        hint = self.host.render([message], renderer=self.config.renderer)
        try:
            await self._score(rollout, demonstration, hint)
        except OverlongError:  # with the demonstration in front it does not fit the context
            rollout.metrics["opsd_overlong"] = 1.0
            _leave_out(rollout)

    async def _score(self, rollout: Rollout, demonstration: str, hint: list[int]) -> None:
        if self.config.min_gain is not None:
            gain = await self.gain(rollout, demonstration, hint)
            rollout.metrics["opsd_gain"] = gain
            if gain <= self.config.min_gain:
                return _leave_out(rollout)
        rollout.assign_ref_logprobs(await sampled_logprobs(self.host.policy, rollout, hint))

    async def gain(self, rollout: Rollout, demonstration: str, hint: list[int]) -> float:
        """Nats a token by which the hint makes the expert's reply to the first prompt likelier."""
        first = rollout.samples[0]
        prompt = first.token_ids[: int(first.loss_mask.argmax())]
        turn = [{"role": "user", "content": ""}, {"role": "assistant", "content": demonstration}]
        expert = self.host.supervised_sample(turn)
        reply = expert.token_ids[expert.loss_mask]  # as the policy would have sampled it
        shown, plain = await asyncio.gather(
            *(
                self.host.policy.logprobs([*start, *prompt, *reply], group_id=rollout.group_id)
                for start in (hint, [])
            )
        )
        return float(np.mean(shown[-len(reply) :] - plain[-len(reply) :]))


def _leave_out(rollout: Rollout) -> None:
    """No token trains; the batch fills the rollout's place with another."""
    rollout.assign_weights("ref_kl", np.zeros(rollout.num_tokens))
    rollout.assign_ref_logprobs(np.zeros(rollout.num_tokens))
