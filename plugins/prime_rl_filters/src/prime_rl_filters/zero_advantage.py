"""A rollout whose every trainable token has no credit teaches nothing."""

from __future__ import annotations

from prime_rl import Filter, Rollout, hookimpl


class ZeroAdvantage(Filter):
    """Fires where an advantage stream was assigned and is zero everywhere. Never where none was
    assigned."""

    name = "zero_advantage"

    @hookimpl
    def filter_rollout(self, rollout: Rollout) -> str | None:
        """Object to a rollout without credit, unless another component trains its tokens."""
        advantages = rollout.advantages
        if advantages is None or advantages.any():
            return None
        return None if rollout.trains_beside_rl else "every advantage is zero"
