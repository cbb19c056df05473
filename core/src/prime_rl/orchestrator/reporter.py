"""What the orchestrator says of itself: metrics of a step, failures by name, rollouts on disk."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from prime_rl.monitor.console import Console
from prime_rl.monitor.metrics import group_metrics, off_policy_metrics, rollout_metrics
from prime_rl.orchestrator.batch import Batch
from prime_rl.orchestrator.dispatcher import OpenGroup
from prime_rl.orchestrator.episode import RolloutResult
from prime_rl.orchestrator.store import write_rollouts
from prime_rl.plugins.base import Monitor
from prime_rl.rollout import Group

log = logging.getLogger(__name__)


@dataclass
class SinceLastStep:
    """What happened since the last batch left."""

    started: float = field(default_factory=time.perf_counter)
    rewards: list[list[float]] = field(default_factory=list)
    """Of each scored group."""
    errors: Counter[str] = field(default_factory=Counter)
    """Failed rollouts by the class of the failure."""
    cancelled: int = 0
    """Rollouts voided in flight, because new weights made them too old."""
    truncated: int = 0
    """Samples cut to ``seq_len``."""


class Reporter:
    """Collects what happened and tells the monitors."""

    def __init__(
        self, run_dir: Path, monitors: Sequence[Monitor], max_steps: int, save_rollouts: bool
    ) -> None:
        self._run_dir = run_dir
        self._monitors = monitors
        self._save_rollouts = save_rollouts
        self._console = Console(max_steps)
        self._started = time.perf_counter()
        self._tokens = 0
        self._rollouts = 0
        self.recent = SinceLastStep()

    def group_scored(self, group: Group) -> None:
        """A group came back and has its credit."""
        self.recent.rewards.append([rollout.reward for rollout in group])

    def rollout_failed(self, env: str, group: OpenGroup, result: RolloutResult) -> None:
        """A rollout came to nothing."""
        kind = result.error_type or "unknown"
        self.recent.errors[kind] += 1
        log.warning(
            "env %r, example %d, group %d: rollout failed and will not train: %s: %s",
            env, group.example_index, group.group_id, kind, result.error,
        )  # fmt: skip

    def step(self, batch: Batch, more: Mapping[str, float]) -> None:
        """A batch has left for the trainer; ``more`` is what only the loop knows."""
        recent, now = self.recent, time.perf_counter()
        self._tokens += sum(rollout.num_tokens for rollout in batch.seen)
        self._rollouts += len(batch.seen)
        staleness = [batch.step - 1 - r.policy_version for r in batch.kept if r.is_live]
        metrics = {
            **rollout_metrics(batch.seen, "all"),
            **rollout_metrics(batch.kept, "effective"),
            **group_metrics(recent.rewards, "train/agg/all"),
            **off_policy_metrics(staleness),
            **{f"train/agg/all/error/{k}": float(n) for k, n in recent.errors.items()},
            "off_policy/dropped": float(recent.cancelled + batch.num_stale),
            "batch/truncated_samples": float(recent.truncated),
            "progress/total_tokens": float(self._tokens),
            "progress/total_rollouts": float(self._rollouts),
            "progress/seconds": now - self._started,
            "time/step": now - recent.started,
            **more,
        }
        self.log(batch.step, metrics)
        self._console.step(batch.step, metrics)
        if self._save_rollouts:
            path = self._run_dir / "rollouts" / f"step_{batch.step}.msgpack"
            write_rollouts(path, batch.step, batch.seen, batch.dropped)
        self.recent = SinceLastStep()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Hand metrics to every monitor; one that fails is reported, and the run goes on."""
        for monitor in self._monitors:
            try:
                monitor.log(step, metrics)
            except Exception:
                log.exception("monitor %r failed at step %d; the run goes on", monitor.name, step)
