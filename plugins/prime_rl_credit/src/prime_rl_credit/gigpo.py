"""GiGPO: groups within a group (Feng et al. 2025, arXiv:2505.10978).

    A_{i,t} = E_i + omega S_{i,t}                                              for every reply

    E_i     = (R_i - mean(R)) / std(R)            over the group
    S_{i,t} = (G_{i,t} - mean(G)) / std(G)        over all replies of the group in the same state
    G_{i,t} = r_{i,t} + gamma G_{i,t+1}           the discounted return from the reply on

The state of a reply (its anchor) is what the env said right before it, token by token: replies to
the same observation are compared, whenever they came. A reply in a state of its own has S = 0. r is
the reward that the env gave the turn; without any, r is the rollout's reward R at the last reply.

Changed from the paper: 1. the standard deviation is that of a population, with 1e-6 added; ``std =
false`` leaves it out, the paper's second choice; 2. states are equal or not: no similarity; 3. the
loss is the run's rl loss, not the paper's clipped surrogate with a KL. The formulas were checked in
descriptions of the paper and in published code.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Annotated

from pydantic import Field, NonNegativeFloat

from prime_rl import Algorithm, Group, PluginConfig, Rollout, hookimpl
from prime_rl_credit.replies import Reply, assign, relative, replies_of


class GiGPOConfig(PluginConfig):
    """Settings of ``gigpo``."""

    omega: NonNegativeFloat = 1.0
    """Weight of the credit within a state."""
    gamma: Annotated[float, Field(ge=0, le=1)] = 0.95
    """Discount of the reward one reply later."""
    std: bool = True
    """Divide by the standard deviations."""


class GiGPO(Algorithm):
    """Credit is that of the episode, plus that of the reply among all replies in the same state."""

    name = "gigpo"
    config_class = GiGPOConfig
    config: GiGPOConfig
    group_relative = True

    def returns(self, rollout: Rollout, replies: list[Reply]) -> list[float]:
        """G of each reply."""
        rewards = [reply.reward or 0.0 for reply in replies]
        if replies and all(reply.reward is None for reply in replies):
            rewards[-1] = rollout.reward
        from_behind = []
        to_go = 0.0
        for reward in reversed(rewards):
            to_go = reward + self.config.gamma * to_go
            from_behind.append(to_go)

        return from_behind[::-1]

    @hookimpl
    def score_group(self, group: Group) -> None:
        """Assign both."""
        replies = [replies_of(rollout) for rollout in group]
        returns = [self.returns(*pair) for pair in zip(group, replies, strict=True)]
        states: defaultdict[tuple[int, ...], list[tuple[int, int]]] = defaultdict(list)
        for i, of_rollout in enumerate(replies):
            for t, reply in enumerate(of_rollout):
                states[reply.observed].append((i, t))

        episode = relative([rollout.reward for rollout in group], self.config.std)
        credit = [
            [value] * len(of_rollout) for value, of_rollout in zip(episode, replies, strict=True)
        ]
        for places in states.values():
            above = relative([returns[i][t] for i, t in places], self.config.std)
            for (i, t), value in zip(places, above, strict=True):
                credit[i][t] += self.config.omega * value

        for rollout, of_rollout, values in zip(group, replies, credit, strict=True):
            assign(rollout, of_rollout, values)
