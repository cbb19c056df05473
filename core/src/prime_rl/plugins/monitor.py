"""Monitors receive metrics. Orchestrator side: entry-point group ``prime_rl``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from prime_rl.plugins.base import Offer, PluginConfig

if TYPE_CHECKING:
    from prime_rl.rollout import Rollout


class Monitor(Offer):
    """Receives metrics. A failing monitor is reported and does not stop the run."""

    in_background: ClassVar[bool] = True
    """Its methods run in a thread of its own, behind a bounded queue, so a slow monitor delays
    nothing. False: the loop calls it and waits."""

    def __init__(self, config: PluginConfig, run_dir: Path) -> None:
        """Keep this quick: connect at the first ``log``."""
        super().__init__(config)
        self.run_dir = run_dir

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Metrics of one step, from one process, by ``group/name``. Steps may come out of order:
        batch n + 1 leaves before step n is trained."""
        raise NotImplementedError

    def wants_rollouts(self, step: int) -> bool:
        """Whether to call ``log_rollouts`` for batch ``step``. Called from the loop."""
        return False

    def log_rollouts(
        self, step: int, rollouts: Sequence[Rollout], dropped: Sequence[str | None]
    ) -> None:
        """Every rollout decided on for batch ``step``, with its credit; ``dropped`` says why each
        does not train (None: it trains). Read only."""

    def close(self) -> None:
        """Flush what is still held."""
