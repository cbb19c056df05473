"""Online DPO: prefer the best rollout of a group to the worst (Guo et al. 2024, arXiv:2402.04792;
DPO: Rafailov et al. 2023, arXiv:2305.18290, equation 7).

    h = log π(y_best) - log ref(y_best) - log π(y_worst) + log ref(y_worst)
    L = mean over groups of -log sigmoid(beta h)

ref is the policy's first weights, which the trainer keeps (``initial_logprobs``); log π(y) sums
over all tokens that the policy sampled in a rollout. The loss is ``dpo``, with
``[trainer.losses.dpo] beta``.

Changed from the papers: 1. the pair is the best and the worst of the group by the env's reward, not
two samples that a judge compares; 2. a group whose rewards are all equal, but for rounding, has no
pair and trains nothing; of several best rollouts the first counts, and so of the worst; 3. rollouts
of older weights are used as they are. The loss was checked in descriptions of DPO, not in the
papers.
"""

from __future__ import annotations

from typing import Any

from prime_rl import Algorithm, Group, at_least, hookimpl
from prime_rl_preference.dpo_loss import DPOConfig


class OnlineDPO(Algorithm):
    """The signal is a pair: the best and the worst rollout of a group."""

    name = "online_dpo"
    action_loss = "dpo"
    group_relative = True

    def objective(self, outcomes: Any) -> Any:
        """The mean log-likelihood of the pair of a group, divided by the group's size, with the
        default ``beta``.

        With F(x) the probability of a reward of at most x and f(x) that of one below, the best
        reward of G rollouts is a and the worst b < a with the probability

            (F(a) - f(b))^G - (f(a) - f(b))^G - (F(a) - F(b))^G + (f(a) - F(b))^G

        Among the replies with these rewards, the pair is drawn by their probabilities.
        """
        from torch.nn.functional import logsigmoid

        r = outcomes.rewards
        p = outcomes.sampled
        size = outcomes.group_size
        # F, f: [K]
        most = (r <= r[:, None]).double() @ p
        below = (r < r[:, None]).double() @ p
        pairs = (
            (most[:, None] - below) ** size
            - (below[:, None] - below) ** size
            - (most[:, None] - most) ** size
            + (below[:, None] - most) ** size
        )  # [K, K]: the best has the row's reward, the worst the column's
        share = p / (most - below)
        chance = (r[:, None] > r) * pairs * share[:, None] * share
        gain = outcomes.log_probabilities - outcomes.reference_log_probabilities
        margin = DPOConfig().beta * (gain[:, None] - gain)
        return (chance * logsigmoid(margin)).sum() / size

    @hookimpl
    def score_group(self, group: Group) -> None:
        """Mark the pair, +1 and -1; the other rollouts train nothing."""
        rewards = [rollout.reward for rollout in group]
        best = rewards.index(max(rewards))
        worst = rewards.index(min(rewards))
        if at_least(rewards[worst], rewards[best]):
            best = worst
        for index, rollout in enumerate(group):
            sign = float(index == best) - float(index == worst)  # 0 where they are one
            rollout.assign_stream("preference", sign)
            rollout.assign_weights("dpo", abs(sign))
