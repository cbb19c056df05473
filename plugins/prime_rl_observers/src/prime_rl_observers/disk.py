"""``system/ckpt_disk_...``: the disk that weights and checkpoints are written to."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from prime_rl import TrainerObserver

if TYPE_CHECKING:
    from prime_rl.trainer.loop import Trainer


class Disk(TrainerObserver):
    """Reports the space on the disk of the run directory, in GiB."""

    name = "disk"

    def started(self, trainer: Trainer, run_dir: Path) -> None:
        """Which disk."""
        self._run_dir = run_dir

    def step_trained(self, step: int, metrics: Mapping[str, float]) -> Mapping[str, float]:
        """Nothing if the disk cannot be asked."""
        try:
            usage = shutil.disk_usage(self._run_dir)
        except OSError:
            return {}
        name = "system/ckpt_disk"
        sizes = {"free": usage.free, "used": usage.used, "total": usage.total}
        metrics_of_disk = {f"{name}_{key}_gib": size / 2**30 for key, size in sizes.items()}
        return metrics_of_disk | {
            f"{name}_free_ratio": usage.free / usage.total if usage.total else 0.0
        }
