"""A rollout with zero credit on every trainable token has no gradient."""

from __future__ import annotations

from prime_rl import Filter, Rollout, hookimpl


class ZeroAdvantage(Filter):
    """Drops a rollout whose advantages were assigned and are all zero, but for the rounding of its
    reward, unless another component trains its tokens. Rollouts without an advantage stream stay.
    """

    name = "zero_advantage"

    @hookimpl
    def filter_rollout(self, rollout: Rollout) -> str | None:
        if rollout.advantages is None or rollout.has_credit:
            return None
        return None if rollout.trains_beside_rl else "every advantage is zero"
