"""Hierarchical GRPO: every agent is measured against those who did the same job.

    A_i = r_i - mean(r over the cohort of i)

The cohort of an agent in ``episode_agents`` is its own rollouts in that episode; of any other
agent, its own rollouts in the group. In a proposer-solver env, solvers are compared on the one
problem they all tried, and proposers over the problems they proposed for one example. A cohort of
one gets 0.

GRPO's baseline (arXiv:2503.20783) on two levels; the deviations listed in ``grpo.py`` hold here
too.
"""

from __future__ import annotations

from collections import defaultdict

from prime_rl import Algorithm, ConfigError, Group, Host, PluginConfig, Rollout, hookimpl
from prime_rl_grpo.centre import centred


class HierarchicalGRPOConfig(PluginConfig):
    """Settings of ``hierarchical_grpo``."""

    episode_agents: tuple[str, ...] = ("solver",)
    """Agents that run several times in an episode and are compared within it. All others are
    compared within the group, each with its own kind."""


class HierarchicalGRPO(Algorithm):
    """Credit is the reward above the mean of the agent's own cohort."""

    name = "hierarchical_grpo"
    config_class = HierarchicalGRPOConfig
    config: HierarchicalGRPOConfig
    # Not group_relative: one episode is enough of a cohort for the agents that repeat within it.

    def check_agents(self, env: str, agents: tuple[str, ...]) -> None:
        """Raises ``ConfigError`` if an agent is configured that the env does not have."""
        if missing := sorted(set(self.config.episode_agents) - set(agents)):
            raise ConfigError(
                f"env {env!r}: algo 'hierarchical_grpo': episode_agents names "
                f"{', '.join(map(repr, missing))}, and the env has {', '.join(map(repr, agents))}. "
                "Name agents of the env, or use grpo where it has only one."
            )

    async def setup(self, host: Host) -> None:
        """Check the agents again: a replay's host has those that were recorded."""
        self.check_agents(host.env, host.agents)

    @hookimpl
    def score_group(self, group: Group) -> None:
        """Assign every rollout its reward minus its cohort's mean."""
        cohorts: defaultdict[tuple[str, int | None], list[Rollout]] = defaultdict(list)
        for rollout in group:
            within = rollout.episode_id if rollout.agent in self.config.episode_agents else None
            cohorts[rollout.agent, within].append(rollout)
        for cohort in cohorts.values():
            rewards = [rollout.reward for rollout in cohort]
            for rollout, advantage in zip(cohort, centred(rewards), strict=True):
                rollout.assign_advantages(advantage)
