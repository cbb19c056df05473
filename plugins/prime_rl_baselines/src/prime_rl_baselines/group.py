"""Baselines from the rewards of a group: rloo, opo, grpo_std, dr_grpo.

r_i is the reward of rollout i, l_i its number of sampled tokens, G the number of rollouts of the
group that did not fail. Every sampled token of rollout i has the advantage A_i.
"""

from __future__ import annotations

from prime_rl import Group, at_least
from prime_rl_baselines.base import Baseline, standardized
from prime_rl_grpo import centered

EPSILON = 1e-6
"""Added to a standard deviation."""


class RLOO(Baseline):
    """REINFORCE leave-one-out (Ahmadian et al. 2024, arXiv:2402.14740).

        A_i = r_i - mean of the other rewards = G / (G - 1) (r_i - mean(r))

    The baseline does not depend on the rollout's own tokens: the gradient is unbiased. It is that
    of the expected reward if the loss is divided by a constant (``[trainer.loss] normalize_by =
    "constant"``).

    Changed from the paper: 1. a lone rollout of its group gets 0; 2. the loss is the run's rl loss,
    with its importance ratio and divisor; 3. a KL to the reference is a penalty, not a part of the
    reward. The equation was checked in descriptions of the paper, not in the paper itself.
    """

    name = "rloo"
    group_relative = True

    def credit(self, group: Group) -> list[float]:
        scale = len(group) / max(len(group) - 1, 1)
        return [scale * above for above in centered([rollout.reward for rollout in group])]


class OPO(Baseline):
    """The optimal reward baseline (Hao et al. 2025, arXiv:2505.23585).

        A_i = r_i - b        b = sum(l_i r_i) / sum(l_i)

    b minimizes the variance of the gradient if all tokens' gradients are orthogonal and equally
    long: the squared norm of a rollout's gradient is then proportional to its length.

    Changed from the paper: 1. l_i counts sampled tokens only; 2. the paper trains exactly
    on-policy, with one optimizer step per batch and no clip; here the run decides; 3. b contains
    the rollout's own reward, as in the paper: the expected gradient shrinks by about 1 / G. The
    formula was checked in a review.
    """

    name = "opo"
    group_relative = True

    def credit(self, group: Group) -> list[float]:
        rewards = [rollout.reward for rollout in group]
        if at_least(min(rewards), max(rewards)):
            return [0.0] * len(group)
        # Rewards are taken relative to the first one, which is more accurate for close rewards.
        above = [rollout.reward - group[0].reward for rollout in group]
        lengths = [rollout.num_trainable_tokens for rollout in group]
        total = sum(length * value for length, value in zip(lengths, above, strict=True))
        return [value - total / max(sum(lengths), 1) for value in above]


class GRPOStd(Baseline):
    """GRPO as published (Shao et al. 2024, DeepSeekMath, arXiv:2402.03300).

        A_i = (r_i - mean(r)) / (std(r) + 1e-6)

    Its loss ``grpo_std`` is PPO's clipped surrogate, averaged over the tokens of each rollout and
    then over rollouts. Known biases: the division by std(r) weighs examples that are nearly always
    or nearly never solved more; 1 / |o_i| punishes a wrong answer less if it is long.

    Changed from the paper: 1. the KL to the reference, 0.04 times k3, is ``penalties = {
    kl_to_initial = 0.04 }``; 2. std is that of a population, with 1e-6 added. The
    objective was checked in documentation of implementations.
    """

    name = "grpo_std"
    group_relative = True
    action_loss = "grpo_std"

    def credit(self, group: Group) -> list[float]:
        return standardized([rollout.reward for rollout in group], EPSILON)


class DrGRPO(Baseline):
    """GRPO done right (Liu et al. 2025, Dr. GRPO, arXiv:2503.20783).

        A_i = r_i - mean(r)

    Its loss ``dr_grpo`` is PPO's clipped surrogate, divided by a constant: no token counts less
    because its rollout is long. ``[trainer.losses.dr_grpo] constant`` must be set; the paper's is
    rollouts per step times the longest completion. The expected gradient is (G - 1) / G times that
    of the expected reward.

    Changed from the paper: 1. a group with a failed rollout is a smaller group. The paper itself
    was not at hand for a check.
    """

    name = "dr_grpo"
    group_relative = True
    action_loss = "dr_grpo"

    def credit(self, group: Group) -> list[float]:
        return centered([rollout.reward for rollout in group])
