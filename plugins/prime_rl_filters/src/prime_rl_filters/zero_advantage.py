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
        trains_otherwise = any(
            stream is not None and bool(stream.any())
            for sample in rollout.samples
            for stream in (sample.ce_weights, sample.ref_kl_weights)
        )
        return None if trains_otherwise else "every advantage is zero"
