"""``[ckpt]``: checkpoints to resume from."""

from __future__ import annotations

from pydantic import PositiveInt

from prime_rl.config.base import Settings


class CkptConfig(Settings):
    """``[ckpt]``: checkpoints for ``--resume``, in ``<run>/checkpoints``. A run writes one when it
    ends: after its last step, or after the step at which it is stopped."""

    enabled: bool = True
    """False: no checkpoints; a stopped run cannot be resumed."""
    interval: PositiveInt | None = None
    """Steps between checkpoints. None: only one when the run ends."""
    keep_last: PositiveInt | None = None
    """Number of newest checkpoints to keep. None: the newest, and all of ``interval``."""
    keep_interval: PositiveInt | None = None
    """Checkpoints of every multiple of this step stay, in addition to ``keep_last``."""

    def is_due(self, step: int, last_step: int) -> bool:
        """Whether step ``step`` of a run that ends with ``last_step`` writes a checkpoint."""
        return self.enabled and (step == last_step or self._is_regular(step))

    def superseded(self, steps: list[int]) -> list[int]:
        """The ``steps`` whose checkpoints can be deleted. The newest never is."""
        return [n for n in sorted(steps)[: -(self.keep_last or 1)] if not self._stays(n)]

    def _is_regular(self, step: int) -> bool:
        return self.interval is not None and step % self.interval == 0

    def _stays(self, step: int) -> bool:
        if self.keep_interval is not None and step % self.keep_interval == 0:
            return True
        return self.keep_last is None and self._is_regular(step)
