"""Held-out examples, before and after: mean reward, and a few rollouts to look at."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any

from prime_rl.orchestrator.env import (
    Environment,
    ModelEndpoint,
    RolloutResult,
    SamplingSettings,
)

log = logging.getLogger(__name__)

NUM_SHOWN = 3
"""Rollouts kept for the summary, from the first examples: the same ones before and after."""


@dataclass(frozen=True)
class EvalEnv:
    """One held-out environment and how it is sampled."""

    name: str
    environment: Environment
    sampling: SamplingSettings
    num_examples: int
    group_size: int


@dataclass
class EvalResult:
    """What one pass over an env's examples gave."""

    env: str
    policy_version: int
    reward: float
    num_rollouts: int
    num_failed: int
    metrics: dict[str, float] = field(default_factory=dict)
    shown: list[dict[str, Any]] = field(default_factory=list)

    def as_metrics(self) -> dict[str, float]:
        """``eval/<env>/...``"""
        name = f"eval/{self.env}"
        terms = {f"{name}/all/metrics/{key}/mean": value for key, value in self.metrics.items()}
        return terms | {
            f"{name}/all/reward/mean": self.reward,
            f"{name}/all/has_error/mean": self.num_failed / max(self.num_rollouts, 1),
            f"{name}/policy_version": float(self.policy_version),
        }

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


async def evaluate(
    env: EvalEnv,
    model: ModelEndpoint,
    version: int,
    seed: int,
    max_inflight: int,
    progress: Callable[[float], None],
) -> EvalResult:
    """Run ``num_examples * group_size`` rollouts at one policy version; a failed one counts as
    reward 0."""
    count = env.num_examples
    if env.environment.num_examples is not None:
        count = min(count, env.environment.num_examples)
    permits, done = asyncio.Semaphore(max_inflight), 0
    total = count * env.group_size

    async def one(example: int, member: int) -> RolloutResult:
        nonlocal done
        async with permits:
            results = await env.environment.run(
                env.environment.examples[example],
                model=model,
                sampling=env.sampling,
                group_id=example,
                cache_salt=str(version),
                seed=seed + example * env.group_size + member,
            )
        done += 1
        progress(done / total)
        # The policy's own result, where an env also has fixed players.
        return next((result for result in results if result.trainable), results[0])

    results = await asyncio.gather(
        *(one(example, member) for example in range(count) for member in range(env.group_size))
    )
    return _summarise(env, version, results)


def _summarise(env: EvalEnv, version: int, results: Sequence[RolloutResult]) -> EvalResult:
    finished = [result for result in results if result.ok]
    reasons = Counter(f"{r.error_type}: {r.error}" for r in results if not r.ok)
    for reason, count in reasons.most_common():
        log.warning("eval %r: %d of %d rollouts failed: %s", env.name, count, len(results), reason)
    names = sorted({name for result in finished for name in result.metrics})
    return EvalResult(
        env=env.name,
        policy_version=version,
        reward=fmean(result.reward if result.ok else 0.0 for result in results),
        num_rollouts=len(results),
        num_failed=len(results) - len(finished),
        metrics={name: fmean(r.metrics.get(name, 0.0) for r in finished) for name in names},
        shown=[_shown(result) for result in results[:: env.group_size][:NUM_SHOWN]],
    )


def _shown(result: RolloutResult) -> dict[str, Any]:
    return {
        "reward": result.reward,
        "messages": [list(message) for message in result.messages],
        "error": result.error,
    }
