"""REINFORCE with a leave-one-out baseline (RLOO, arXiv:2402.14740).

    A_i = r_i - mean(r_j over j != i)          on every token that rollout i sampled

Changed from the paper: 1. the group has only rollouts that did not fail, and a single one gets 0;
2. credit may be clipped (``limit``).
"""

from __future__ import annotations

from prime_rl import Algorithm, Group, PluginConfig, hookimpl
from pydantic import PositiveFloat

prime_rl_contract = 2
"""The version of the plugin contract that this module is written for."""


class MyAlgoConfig(PluginConfig):
    """Settings of ``my_algo``."""

    limit: PositiveFloat | None = None
    """Credit is clipped to ±limit. None: no limit."""


class MyAlgo(Algorithm):
    """Credit is the reward minus the mean of the others'."""

    name = "my_algo"
    config_class = MyAlgoConfig
    config: MyAlgoConfig
    group_relative = True

    @hookimpl
    def score_group(self, group: Group) -> None:
        """Assign every rollout its reward minus the mean of the others'."""
        # Measured from the first reward: equal rewards then give exactly 0.0.
        above = [rollout.reward - group[0].reward for rollout in group]
        others = max(len(group) - 1, 1)
        for rollout, own in zip(group, above, strict=True):
            rollout.assign_advantages(self.clipped(own - (sum(above) - own) / others))

    def clipped(self, credit: float) -> float:
        """Credit within the limit."""
        limit = self.config.limit
        return credit if limit is None else max(-limit, min(limit, credit))


@hookimpl
def register_algorithms() -> list[type[Algorithm]]:
    """Offer ``my_algo``."""
    return [MyAlgo]
