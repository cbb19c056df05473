"""Reinforce-Ada: sample a group until it is useful (Xiong et al. 2025, arXiv:2510.04996).

    round      ``group_size`` rollouts; the next one follows until the group has ``positives``
               rollouts with a reward above ``threshold`` and ``negatives`` others, or
               ``max_group_size`` rollouts
    credit     A_i = r_i - mean of all rewards of the group
    training   ``keep`` rollouts: half of them positive, as far as there are so many of each sort

Hard examples get more rollouts, and few groups have equal rewards. ``positives = 1, negatives =
0`` is the paper's variant for positives (Ada-pos), ``positives = 1, negatives = 1`` the dynamic
sampling of DAPO (arXiv:2503.14476) that completes a group instead of dropping it.

What it estimates: stopping and choosing look at rewards alone, in the order of the members. If
rewards are 0 or 1 and p is the chance of a 1, the expected update is therefore

    g(p) grad p        g(p) = E[ (sum of A_i over kept positives) / p
                                 - (sum of A_i over kept others) / (1 - p) ]

so every example climbs its own p, at a rate g that depends on p: it is the gradient of no expected
reward. ``weights = "pool"`` multiplies A_i by n / k: n rollouts of the group are of its sort, and k
of these are kept. Then g is what it would be if all rollouts of the group trained.

Changed from the paper: 1. it keeps the first rollouts of each sort; 2. no division by a standard
deviation; 3. ``early`` checks after every rollout of a round, and stops its siblings; 4.
``weights``; 5. a failed rollout is of no sort. The rule was checked in the paper's abstract and in
the authors' implementation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, model_validator

from prime_rl import ConfigError, Group, GroupProgress, PluginConfig, Rollout, hookimpl, log_metric
from prime_rl_baselines.base import Baseline, BaselineConfig
from prime_rl_grpo import centered


class ReinforceAdaConfig(BaselineConfig):
    """Settings of ``reinforce_ada``."""

    keep: Annotated[int, Field(ge=2)] = 8
    """Rollouts of a group that train."""
    threshold: float = 0.5
    """Rewards above it are positive."""
    positives: NonNegativeInt | None = None
    """Positive rollouts that a group needs. None: half of ``keep``."""
    negatives: NonNegativeInt | None = None
    """Others that it needs. None: the other half."""
    early: bool = False
    """Check after each rollout of a round, and cancel the others once the group is useful."""
    weights: Literal["equal", "pool"] = "equal"
    """``pool``: what is kept of a sort stands for all of it."""

    @model_validator(mode="after")
    def _needs_something(self) -> ReinforceAdaConfig:
        if self.needed == (0, 0):
            raise ValueError("positives = 0 and negatives = 0: expected at least one of them")
        return self

    @property
    def needed(self) -> tuple[int, int]:
        """Positive rollouts and others."""
        half = self.keep // 2
        positives = half if self.positives is None else self.positives
        negatives = self.keep - half if self.negatives is None else self.negatives
        return positives, negatives


class ReinforceAda(Baseline):
    """Credit is the reward minus the mean of a group that grows until it is useful."""

    name = "reinforce_ada"
    config_class = ReinforceAdaConfig
    config: ReinforceAdaConfig
    objective = "none"
    group_relative = True
    grows_groups = True

    def __init__(self, config: PluginConfig) -> None:
        super().__init__(config)
        self.trains_at_most = self.config.keep

    def check_agents(self, env: str, agents: tuple[str, ...]) -> None:
        """Raise ``ConfigError`` for several agents: ``keep`` counts rollouts, not episodes."""
        if len(agents) > 1:
            raise ConfigError(
                f"env {env!r}: algo 'reinforce_ada' compares rollouts of one agent, and the env "
                f"has {', '.join(agents)}. Use hierarchical_grpo."
            )

    @hookimpl
    def wanted_members(self, progress: GroupProgress) -> int | None:
        """Another round, none, or no sibling more."""
        is_round = progress.ended == progress.size
        if not (is_round or self.config.early):
            return None
        if self.is_useful(progress.rollouts):
            return progress.ended
        if is_round:
            return min(progress.size + progress.group_size, progress.max_group_size)
        return None

    def is_useful(self, rollouts: Group) -> bool:
        """Whether there are enough of both sorts."""
        positive, other = self.sorts(rollouts)
        positives, negatives = self.config.needed
        return len(positive) >= positives and len(other) >= negatives

    def sorts(self, rollouts: Group) -> tuple[list[Rollout], list[Rollout]]:
        """The positive ones, and the others."""
        positive = [each for each in rollouts if each.reward > self.config.threshold]
        other = [each for each in rollouts if not each.reward > self.config.threshold]
        return positive, other

    def kept(self, rollouts: Group) -> list[list[Rollout]]:
        """What trains of each sort: the first ones, in the order of the members."""
        sorts = self.sorts(rollouts)
        half = self.config.keep // 2
        numbers = shared_out(self.config.keep, [half, self.config.keep - half], [*map(len, sorts)])
        return [sort[:number] for sort, number in zip(sorts, numbers, strict=True)]

    def credit(self, group: Group) -> list[float]:
        """The credit of every rollout, kept or not."""
        return centered([rollout.reward for rollout in group])

    @hookimpl
    def score_group(self, group: Group) -> None:
        """Assign the credit, and leave out what is not kept."""
        log_metric("members", len(group))
        super().score_group(group)
        left_out = {id(rollout): rollout for rollout in group}
        for sort, kept in zip(self.sorts(group), self.kept(group), strict=True):
            for rollout in kept:
                del left_out[id(rollout)]
                if self.config.weights == "pool" and rollout.advantages is not None:
                    rollout.assign_advantages(rollout.advantages * (len(sort) / len(kept)))

        for rollout in left_out.values():
            for loss in (self.action_loss, *self.config.penalties):
                rollout.assign_weights(loss, 0.0)


def shared_out(total: int, wanted: Sequence[int], there: Sequence[int]) -> list[int]:
    """``wanted`` of each of two sorts; where one has fewer, more of the other."""
    first = min(wanted[0], there[0])
    second = min(total - first, there[1])
    return [min(total - second, there[0]), second]
