"""``[ckpt]``: checkpoints to resume from."""

from __future__ import annotations

from pydantic import PositiveInt

from prime_rl.config.base import Settings


class CkptConfig(Settings):
    """``[ckpt]``: what ``--resume`` goes on from, in ``<run>/checkpoints``. Every run writes one
    checkpoint where it ends: after its last step, or after the step at which it is stopped."""

    enabled: bool = True
    """False: no checkpoint is written. A run that is stopped then cannot be resumed."""
    interval: PositiveInt | None = None
    """Every how many steps a checkpoint is written besides. None: only where the run ends."""
    keep_last: PositiveInt | None = None
    """How many of the newest stay on disk. None: the newest, and all that ``interval`` asks for."""
    keep_interval: PositiveInt | None = None
    """Checkpoints of these steps (every so many) stay, whatever ``keep_last`` says."""

    def is_due(self, step: int, last_step: int) -> bool:
        """Whether a checkpoint follows step ``step`` of a run that ends with ``last_step``."""
        return self.enabled and (step == last_step or self._is_regular(step))

    def superseded(self, steps: list[int]) -> list[int]:
        """Those of ``steps`` that need not stay. The newest always does."""
        old = sorted(steps)[: -(self.keep_last or 1)]
        return [n for n in old if not self._stays(n)]

    def _is_regular(self, step: int) -> bool:
        return self.interval is not None and step % self.interval == 0

    def _stays(self, step: int) -> bool:
        if self.keep_interval is not None and step % self.keep_interval == 0:
            return True
        return self.keep_last is None and self._is_regular(step)
