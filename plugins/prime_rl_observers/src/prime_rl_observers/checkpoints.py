"""``system/ckpt_step``, ``system/ckpt_gib``, ``time/ckpt_complete``: what a run would keep now."""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path

from prime_rl import Observer, ObserverHost, PluginConfig

log = logging.getLogger("prime_rl.orchestrator.checkpoint")


class CheckpointMetrics(Observer):
    """Reports each complete checkpoint: its step, its size, the seconds since its batch left."""

    name = "checkpoint_metrics"

    def __init__(self, config: PluginConfig, host: ObserverHost) -> None:
        super().__init__(config, host)
        self._left: dict[int, float] = {}
        """When the batch of each step left that may still get a checkpoint."""

    async def batch_leaves(self, step: int) -> None:
        """Start the clock."""
        self._left[step] = time.perf_counter()

    async def checkpoint_complete(self, step: int, folder: Path) -> None:
        """Log it, as metrics of its step. One that the run resumes has no seconds."""
        now = time.perf_counter()
        gib = await asyncio.to_thread(_size, folder) / 2**30
        metrics = {"system/ckpt_step": float(step), "system/ckpt_gib": gib}
        started = self._left.get(step)
        if started is not None:
            metrics["time/ckpt_complete"] = now - started
            log.info("step %d: checkpoint complete, %.3f GiB, in %s", step, gib, folder)
        for earlier in [other for other in self._left if other <= step]:
            del self._left[earlier]
        self.host.log(step, metrics)


def _size(folder: Path) -> int:
    """Bytes of all files; 0 if the folder has been deleted."""
    sizes = []
    for path in folder.rglob("*"):
        try:
            if path.is_file():
                sizes.append(path.stat().st_size)
        except OSError:  # deleted meanwhile
            continue
    return sum(sizes)
