"""Metrics of every batch, and a line about it in the orchestrator's log."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from prime_rl import Group, Observer, ObserverHost, PluginConfig, Rollout
from prime_rl.env.traces import timing_of
from prime_rl.orchestrator.buffer import STALE
from prime_rl_observers.rollout_metrics import (
    Ended,
    ProgressCounts,
    batch_metrics,
    dropped_metrics,
    lost_metrics,
    off_policy_metrics,
    outcome_metrics,
    rollout_metrics,
    solved_metrics,
    timing_metrics,
)

if TYPE_CHECKING:
    from prime_rl.rollout import Batch

log = logging.getLogger("prime_rl.orchestrator.reporter")

SAMPLED = ("policy", "frozen")
"""Sources whose rollouts were sampled in this run, so that their timing means something."""


@dataclass
class SinceLastStep:
    """What happened since the last batch was sent."""

    started: float = field(default_factory=time.perf_counter)
    rewards: list[tuple[str, list[float]]] = field(default_factory=list)
    """Env and rewards of each scored group."""
    ended: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    """How rollouts ended, by env: ``finished``, ``error/<class>``."""
    timings: list[tuple[str, dict[str, float]]] = field(default_factory=list)
    """Env and seconds by stage of each sampled rollout."""
    cancelled: Counter[str] = field(default_factory=Counter)
    """Rollouts voided in flight, by env, because new weights made them too old."""
    lost: list[Ended] = field(default_factory=list)
    """Rollouts that failed or were cancelled."""


class BatchMetrics(Observer):
    """Measures the rollouts of each batch: rewards, lengths, failures, staleness, seconds."""

    name = "batch_metrics"

    def __init__(self, config: PluginConfig, host: ObserverHost) -> None:
        super().__init__(config, host)
        self._console = ConsoleLine(host.shared.run.config.max_steps)
        self._progress = ProgressCounts()
        self._arrived: dict[int, int] = {}
        self._batch: Batch | None = None
        self.recent = SinceLastStep()

    async def before_training(self) -> None:
        """Start the clock: no engine is waited for any more."""
        self.recent.started = time.perf_counter()

    def _whole(self, groups: list[tuple[str, list[float]]]) -> list[tuple[str, list[float]]]:
        """Without the groups of envs whose rollouts come alone: some of their members are in other
        steps."""
        return [(env, rewards) for env, rewards in groups if not self.host.scored_alone(env)]

    def group_scored(self, group: Group, version: int) -> None:
        """Count it in the statistics, unless no live policy sampled it."""
        if not all(rollout.is_live for rollout in group):
            return
        env = group[0].env
        self.recent.rewards.append((env, [rollout.reward for rollout in group]))
        self.recent.ended[env]["finished"] += len(group)
        self._arrived |= {id(rollout): version for rollout in group}
        self.recent.timings += _timings(group)

    def rollouts_lost(self, env: str, outcome: str, number: int) -> None:
        """Count them."""
        if outcome == "cancelled":
            self.recent.cancelled[env] += number
            self.recent.lost += [Ended(env, "age")] * number
        else:
            self.recent.ended[env][outcome] += number

    def rollout_failed(self, env: str, kind: str, tokens: int, turns: int) -> None:
        """Note how far it came."""
        why = "time" if kind == "TimeoutError" else "failure"
        self.recent.lost.append(Ended(env, why, output_tokens=tokens, turns=turns))

    async def batch_taken(self, batch: Batch) -> None:
        """Keep it until it is sent."""
        self._batch = batch

    def batch_lost(self, batch: Batch) -> None:
        """The metrics of what was dropped show why nothing trains."""
        self._batch = batch

    def take_metrics(self) -> Mapping[str, float]:
        """Metrics of the batch that was sent."""
        batch = self._batch
        if batch is None:
            return {}
        recent = self.recent
        now = time.perf_counter()
        stale = sum(reason == STALE for reason in batch.dropped.values())
        decided = [_ended(each, batch.dropped.get(id(each))) for each in batch.seen if each.is_live]
        live = [rollout for rollout in batch.kept if rollout.is_live]
        staleness = [batch.step - 1 - rollout.policy_version for rollout in live]
        arrived = [self._arrived.get(id(rollout)) for rollout in live]
        in_flight = [
            None if version is None else version - rollout.policy_version
            for version, rollout in zip(arrived, live, strict=True)
        ]
        for rollout in batch.seen:
            self._arrived.pop(id(rollout), None)
        metrics = {
            **rollout_metrics(batch.seen, "all"),
            **rollout_metrics(batch.kept, "effective"),
            **solved_metrics(self._whole(recent.rewards)),
            **solved_metrics(self._whole(_groups(live)), "effective"),
            **outcome_metrics(recent.ended, recent.cancelled),
            **timing_metrics(recent.timings),
            **timing_metrics(_timings(batch.kept), "effective"),
            **off_policy_metrics(staleness, in_flight),
            **batch_metrics(batch.seen, batch.kept),
            **dropped_metrics(batch),
            **lost_metrics([*decided, *recent.lost]),
            "off_policy/dropped": float(recent.cancelled.total() + stale),
            **self._progress.step(batch.seen),
        }
        envs = sorted({rollout.env for rollout in batch.seen})
        seconds = now - recent.started
        self._console.step(batch.step, metrics | {"time/step": seconds}, envs)
        self._batch = None
        self.recent = SinceLastStep()
        return metrics


def _ended(rollout: Rollout, dropped: str | None) -> Ended:
    tokens = rollout.num_trainable_tokens
    turns = rollout.num_turns
    lost = "age" if dropped == STALE else None
    return Ended(rollout.env, lost, output_tokens=tokens, turns=turns, reward=rollout.reward)


def _timings(rollouts: Sequence[Rollout]) -> list[tuple[str, dict[str, float]]]:
    """The env, and the seconds by stage, of each rollout that this attempt at the run sampled."""
    sampled = (r for r in rollouts if r.trace is not None and r.source in SAMPLED)
    return [(rollout.env, timing_of(rollout.trace)) for rollout in sampled]


def _groups(rollouts: Sequence[Rollout]) -> list[tuple[str, list[float]]]:
    """Env and rewards of each group, as far as they are among ``rollouts``."""
    groups: dict[tuple[str, int], list[float]] = defaultdict(list)
    for rollout in rollouts:
        groups[rollout.env, rollout.group_id].append(rollout.reward)
    return [(env, rewards) for (env, _), rewards in groups.items()]


class ConsoleLine:
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
