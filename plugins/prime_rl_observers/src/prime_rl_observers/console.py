"""A line for each step in the trainer's log."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from prime_rl import TrainerObserver

if TYPE_CHECKING:
    from prime_rl.trainer.loop import Trainer

logger = logging.getLogger("prime_rl.trainer.loop")


class StepConsole(TrainerObserver):
    """Logs a line for each step."""

    name = "console"

    def started(self, trainer: Trainer, run_dir: Path) -> None:
        """Keep the trainer."""
        self._trainer = trainer

    def step_done(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log it."""
        logger.info("%s", console_line(step, self._trainer.max_steps, metrics))


def console_line(step: int, max_steps: int, metrics: Mapping[str, float]) -> str:
    """``Step 3/180 | 0.71s | Loss ...``: one step."""
    mfu = metrics.get("perf/mfu")
    memory = metrics.get("perf/peak_memory")
    return " | ".join(
        [
            f"Step {step}/{max_steps}",
            f"{metrics['time/step']:.2f}s",
            f"Loss {metrics['loss/mean']:.4f}",
            f"Entropy {metrics.get('entropy/all/mean', math.nan):.4f}",
            f"Mismatch KL {metrics.get('mismatch_kl/all/mean', math.nan):.2e}",
            f"Grad. Norm {metrics['optim/grad_norm']:.4f}",
            f"LR {metrics['optim/lr']:.2e}",
            f"Throughput {metrics['perf/throughput']:.0f} tokens/s",
            *([] if mfu is None else [f"MFU {mfu:.1f}%"]),
            *([] if memory is None else [f"Peak Mem. {memory:.1f} GiB"]),
        ]
    )
