"""The orchestrator's log: one line per step and one per env."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence

log = logging.getLogger(__name__)


class Console:
    """Writes ``Step 3/180 | 0.71s | Reward 0.6120 | ...`` to the log."""

    def __init__(self, max_steps: int) -> None:
        self._max_steps = max_steps

    def step(self, step: int, metrics: Mapping[str, float], envs: Sequence[str] = ()) -> None:
        """Log one finished batch; several envs get a line each."""
        log.info(
            "Step %d/%d | %.2fs | %s | Max Off-Policy %.0f | %s",
            step,
            self._max_steps,
            metrics.get("time/step", 0.0),
            _credit("agg", metrics),
            metrics.get("off_policy/max", 0.0),
            _endings("agg", metrics, "has_error", "cancelled", "is_truncated"),
        )
        if len(envs) > 1:
            for env in envs:
                endings = _endings(env, metrics, "has_error", "is_truncated")
                log.info("  |-- %s | %s | %s", env, _credit(env, metrics), endings)


LABELS = {"has_error": "Error", "cancelled": "Cancelled", "is_truncated": "Truncation"}


def _credit(env: str, metrics: Mapping[str, float]) -> str:
    name = f"train/{env}/all"
    seen, kept = (metrics.get(f"batch/{env}/{key}", 0.0) for key in ("seen", "trainable"))
    share = 100 * kept / seen if seen else 0.0
    return (
        f"Reward {metrics.get(f'{name}/reward/mean', math.nan):.4f} | "
        f"Trainable {kept:.0f}/{seen:.0f} ({share:.1f}%) | "
        f"Turns {metrics.get(f'{name}/num_turns/mean', 0.0):.1f} | "
        f"Branches {metrics.get(f'{name}/num_branches/mean', 0.0):.1f}"
    )


def _endings(env: str, metrics: Mapping[str, float], *keys: str) -> str:
    """Fractions of rollouts, in percent."""
    shares = {key: 100 * metrics.get(f"train/{env}/all/{key}/mean", 0.0) for key in keys}
    return " | ".join(f"{LABELS[key]} {share:.1f}%" for key, share in shares.items())
