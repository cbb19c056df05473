"""Hierarchical GRPO: every rollout is compared with rollouts of the same agent.

    A_i = r_i - mean(r over the cohort of i)

For an agent in ``episode_agents``, the cohort is the agent's rollouts in that episode. For any
other agent, it is the agent's rollouts in the group. In a proposer-solver env, solvers are compared
on the one problem that they all tried, and proposers over the problems that they proposed for one
example. A cohort of one gets 0.

This is GRPO's baseline (arXiv:2503.20783) on two levels, with the deviations listed in ``grpo.py``.
"""

from __future__ import annotations

from collections import defaultdict

from prime_rl import Algorithm, ConfigError, Group, Host, PluginConfig, Rollout, hookimpl
from prime_rl_grpo.center import centered


class HierarchicalGRPOConfig(PluginConfig):
    """Settings of ``hierarchical_grpo``."""

    episode_agents: tuple[str, ...] = ("solver",)
    """Agents that run several times in an episode and are compared within it. Every other agent is
    compared with itself within the group."""


class HierarchicalGRPO(Algorithm):
    """Credit is the reward minus the mean of the agent's cohort."""

    name = "hierarchical_grpo"
    config_class = HierarchicalGRPOConfig
    config: HierarchicalGRPOConfig
    # One episode is a cohort for agents that run several times in it.
    group_relative = False

    def check_agents(self, env: str, agents: tuple[str, ...]) -> None:
        """Raises ``ConfigError`` if the env lacks a configured agent."""
        missing = sorted(set(self.config.episode_agents) - set(agents))
        if missing:
            raise ConfigError(
                f"env {env!r}: algo 'hierarchical_grpo': episode_agents names "
                f"{', '.join(map(repr, missing))}, and the env has {', '.join(map(repr, agents))}. "
                "Name agents of the env, or use grpo if it has only one."
            )

    async def setup(self, host: Host) -> None:
        """Check the agents again: a replayed run has the recorded agents."""
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
            for rollout, advantage in zip(cohort, centered(rewards), strict=True):
                rollout.assign_advantages(advantage)
