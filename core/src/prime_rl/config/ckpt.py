"""``[ckpt]``: checkpoints to resume from."""

from __future__ import annotations

from pydantic import PositiveInt

from prime_rl.config.base import Settings


class CkptConfig(Settings):
    """``[ckpt]``: what ``--resume`` goes on from, in ``<run>/checkpoints``. An empty table: one
    checkpoint, after the last step. No table: none."""

    interval: PositiveInt | None = None
    """Every how many steps. None: after the last one only."""
    keep_last: PositiveInt | None = None
    """How many of the newest stay on disk. None: all."""
    keep_interval: PositiveInt | None = None
    """Checkpoints of these steps (every so many) stay, whatever ``keep_last`` says."""

    def is_due(self, step: int, max_steps: int) -> bool:
        """Whether a checkpoint follows step ``step`` of ``max_steps``."""
        return step == max_steps or (self.interval is not None and step % self.interval == 0)

    def superseded(self, steps: list[int]) -> list[int]:
        """Those of ``steps`` that need not stay. The newest always does."""
        if self.keep_last is None:
            return []
        old = sorted(steps)[: -self.keep_last]
        return [n for n in old if self.keep_interval is None or n % self.keep_interval]
