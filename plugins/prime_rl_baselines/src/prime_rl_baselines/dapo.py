"""DAPO (Yu et al. 2025, arXiv:2503.14476).

    s_i = r_i + p(l_i)        A_i = (s_i - mean(s)) / (std(s) + 1e-6)

    p(l) = 0                               l <= max_tokens - cache
         = ((max_tokens - cache) - l) / cache    up to max_tokens
         = -1                              above

l_i is the number of sampled tokens. Its loss ``dapo`` is PPO's surrogate with the clip 0.2 below
and 0.28 above (clip-higher), averaged over all tokens of the batch (token mean), without KL.

Dynamic sampling: a group whose rewards are all equal, but for rounding, gets no credit, whatever
its lengths. The filter ``zero_advantage``, which is on by default, drops it, and the batch is
filled with others.

Changed from the paper: 1. ``max_tokens`` has no default of 20480: the penalty must fit the run's
own limit, so without it there is none; 2. std is that of a population, with 1e-6 added; 3. a
rollout that was cut short is penalized for its length like any other.

Clip, dynamic sampling and divisor were checked in descriptions of the paper, not in the paper.
"""

from __future__ import annotations

from pydantic import NonNegativeFloat, PositiveInt, model_validator

from prime_rl import Group, at_least
from prime_rl_baselines.base import Baseline, BaselineConfig, standardized
from prime_rl_baselines.group import EPSILON


class DAPOConfig(BaselineConfig):
    """Settings of ``dapo``."""

    max_tokens: PositiveInt | None = None
    """Sampled tokens from which on the overlong penalty is complete; 20480 in the paper. None: no
    penalty."""
    cache: PositiveInt = 4096
    """Length of the interval below ``max_tokens`` in which the penalty grows."""
    overlong_penalty: NonNegativeFloat = 1.0
    """What an overlong rollout loses."""

    @model_validator(mode="after")
    def _cache_fits(self) -> DAPOConfig:
        if self.max_tokens is not None and self.cache > self.max_tokens:
            raise ValueError(
                f"cache is {self.cache} and max_tokens {self.max_tokens}: the penalty would begin "
                "below zero tokens. Lower cache; the paper's is a fifth of max_tokens"
            )
        return self


class DAPO(Baseline):
    """Standardized rewards with a soft penalty of length; tied groups get nothing."""

    name = "dapo"
    config_class = DAPOConfig
    config: DAPOConfig
    group_relative = True
    action_loss = "dapo"

    def penalty(self, length: int) -> float:
        """p(l): 0 up to the cache's start, then linear down to ``-overlong_penalty``."""
        if self.config.max_tokens is None:
            return 0.0
        above = length - (self.config.max_tokens - self.config.cache)
        return -self.config.overlong_penalty * min(max(above / self.config.cache, 0.0), 1.0)

    def credit(self, group: Group) -> list[float]:
        rewards = [rollout.reward for rollout in group]
        if at_least(min(rewards), max(rewards)):
            return [0.0] * len(group)
        lengths = [rollout.num_trainable_tokens for rollout in group]
        shaped = [r + self.penalty(n) for r, n in zip(rewards, lengths, strict=True)]
        return standardized(shaped, EPSILON)
