"""Held-out examples at one policy version: reward, pass@k, and a few rollouts to look at."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from math import comb, sqrt
from statistics import fmean, stdev
from typing import Any

from prime_rl.config.orchestrator import EvalConfig, EvalEnvConfig
from prime_rl.env.environment import Environment, SamplingSettings
from prime_rl.env.episode import RolloutResult
from prime_rl.rewards import settled
from prime_rl_observers.rollout_metrics import Reduced, describe

log = logging.getLogger(__name__)

NUM_SHOWN = 3
"""Rollouts kept for the summary, from the first examples: the same ones before and after."""


@dataclass(frozen=True, eq=False)
class EvalEnv:
    """One held-out environment and how it is sampled."""

    name: str
    environment: Environment
    sampling: SamplingSettings
    num_examples: int
    group_size: int
    interval: int | None = None
    """Versions between two evaluations. None: before and after training only."""

    @classmethod
    def of(cls, env: EvalEnvConfig, table: EvalConfig, environment: Environment) -> EvalEnv:
        """An entry of ``table``. A sampling parameter that is None is the engine's default."""
        return cls(
            name=env.label,
            environment=environment,
            sampling=env.sampling or table.sampling,
            num_examples=env.num_examples,
            group_size=env.group_size,
            interval=env.interval,
        )

    @property
    def num_rollouts(self) -> int:
        """Examples, as far as there are any, times the group size."""
        known = self.environment.num_examples
        count = self.num_examples if known is None else min(self.num_examples, known)
        return count * self.group_size

    def is_due(self, version: int, last: int) -> bool:
        """Whether ``version`` is the first since ``last`` to reach a multiple of the interval."""
        return self.interval is not None and version // self.interval > last // self.interval


@dataclass(frozen=True, eq=False)
class Job:
    """One rollout to come."""

    env: EvalEnv
    example: int
    member: int


def jobs_of(envs: Sequence[EvalEnv]) -> Iterator[Job]:
    """Every rollout of every env, the envs taking turns."""
    for numbers in zip_longest(*(range(env.num_rollouts) for env in envs)):
        for env, number in zip(envs, numbers, strict=True):
            if number is None:  # this env has fewer
                continue
            example, member = divmod(number, env.group_size)
            yield Job(env, example, member)


@dataclass
class EvalResult:
    """The result of one pass over an env's examples."""

    env: str
    policy_version: int
    reward: float
    num_rollouts: int
    num_failed: int
    metrics: dict[str, float] = field(default_factory=dict)
    shown: list[dict[str, Any]] = field(default_factory=list)
    measures: dict[str, float] = field(default_factory=dict)
    """Everything else, by its full name: ``eval/<env>/pass@4``."""

    def as_metrics(self) -> dict[str, float]:
        """``eval/<env>/...``"""
        name = f"eval/{self.env}"
        return {
            **self.measures,
            **{f"{name}/all/metrics/{key}/mean": value for key, value in self.metrics.items()},
            f"{name}/all/reward/mean": self.reward,
            f"{name}/all/has_error/mean": self.num_failed / max(self.num_rollouts, 1),
            f"{name}/num_failed": float(self.num_failed),
            f"{name}/policy_version": float(self.policy_version),
        }


@dataclass(frozen=True)
class Finished:
    """One rollout of an evaluation."""

    example: int
    result: RolloutResult
    episode: Sequence[RolloutResult] = ()
    """What each agent did; ``result`` is their mean."""

    @property
    def reward(self) -> float:
        """0.0 for a failed rollout."""
        return self.result.reward if self.result.ok else 0.0


def of_the_policy(results: Sequence[RolloutResult]) -> RolloutResult:
    """One episode as one result: the mean of the policy's agents, without agents of other models.
    Each agent's own reward is the metric ``reward/AGENT``. An episode fails if one of its agents
    fails, as in training: the rewards of the others are then no measure."""
    failed = next((result for result in results if not result.ok), None)
    if failed is not None:
        return failed

    ours = [result for result in results if result.trainable]
    if not ours:
        return results[0]
    if len(ours) == 1:
        return ours[0]

    columns: dict[str, list[float]] = defaultdict(list)
    for result in ours:
        columns[f"reward/{result.agent}"].append(result.reward)
        for name, value in result.metrics.items():
            columns[name].append(value)

    metrics = {name: fmean(values) for name, values in columns.items()}
    reward = fmean(result.reward for result in ours)
    return replace(ours[0], reward=reward, metrics=metrics)


def summarize(env: EvalEnv, version: int, finished: Sequence[Finished]) -> EvalResult:
    """The result at ``version``, of the rollouts that finished in time, at least one, in order of
    their examples."""
    results = [each.result for each in finished]
    done = [result for result in results if result.ok]
    reasons = Counter(f"{result.error_type}: {result.error}" for result in results if not result.ok)
    for reason, count in reasons.most_common():
        log.warning("eval %r: %d of %d rollouts failed: %s", env.name, count, len(results), reason)

    metrics: dict[str, list[float]] = defaultdict(list)
    for result in done:  # each over the rollouts that have it
        for name, value in result.metrics.items():
            metrics[name].append(value)

    first = {each.example: each.result for each in reversed(finished)}
    shown = [
        {
            "reward": first[example].reward,
            "messages": [list(message) for message in first[example].messages],
            "error": first[example].error,
        }
        for example in sorted(first)[:NUM_SHOWN]
    ]
    further = measures(f"eval/{env.name}", finished)
    further[f"eval/{env.name}/cancelled"] = float(env.num_rollouts - len(finished))
    return EvalResult(
        env=env.name,
        policy_version=version,
        reward=fmean(each.reward for each in finished),
        num_rollouts=len(results),
        num_failed=len(results) - len(done),
        metrics={name: fmean(values) for name, values in sorted(metrics.items())},
        shown=shown,
        measures=further,
    )


def measures(name: str, finished: Sequence[Finished]) -> Reduced:
    """``name/all/...`` over every rollout (a failed one counts as reward 0), ``name/effective/...``
    over those that did not fail, and pass@k over examples."""
    done = [each for each in finished if each.result.ok]
    metrics: Reduced = {}
    for key, values in _columns(finished, done).items():
        metrics |= describe(values, f"{name}/{key}")
    for key, share in _endings(finished, done).items():
        metrics[f"{name}/all/{key}"] = share

    branches = [branch for each in done for branch in each.result.branches]
    versions = {
        version
        for branch in branches
        for version in branch.policy_versions or ()
        if version >= 0  # a token that no policy sampled has -1
    }
    if versions:  # the engine reports them
        metrics[f"{name}/num_policy_versions"] = float(len(versions))

    rewards: dict[int, list[float]] = defaultdict(list)
    for each in finished:
        rewards[each.example].append(each.reward)
    groups = list(rewards.values())
    if len(groups) > 1:
        metrics[f"{name}/all/reward/stderr"] = standard_error(groups)
    for key, rate in pass_rates(groups).items():
        metrics[f"{name}/{key}"] = rate
    return metrics


def _columns(finished: Sequence[Finished], done: Sequence[Finished]) -> dict[str, Sequence[float]]:
    """The values to describe by mean, extremes and percentiles. Lengths and times: of rollouts that
    did not fail."""
    tokens = [num_tokens(each.result) for each in done]
    columns: dict[str, Sequence[float]] = {
        "all/reward": [each.reward for each in finished],
        "effective/reward": [each.reward for each in done],
        "all/num_turns": [each.result.num_turns for each in done],
        "all/num_branches": [len(each.result.branches) for each in done],
        "all/num_input_tokens": [num_given for num_given, _ in tokens],
        "all/num_output_tokens": [num_sampled for _, num_sampled in tokens],
        "all/num_total_tokens": [sum(numbers) for numbers in tokens],
    }
    named: dict[str, list[float]] = defaultdict(list)
    for each in done:
        for term, value in each.result.rewards.items():
            named[f"all/rewards/{term}"].append(value)
        for stage, seconds in each.result.timing.items():
            named[f"all/timing/{stage}"].append(seconds)

    return columns | dict(sorted(named.items()))


def _endings(finished: Sequence[Finished], done: Sequence[Finished]) -> Reduced:
    """Shares of rollouts that finished or were truncated, and of stop conditions; the number of
    failures by class."""
    if not finished:
        return {}

    shares = {"is_completed/mean": len(done) / len(finished)}
    if done:
        shares["is_truncated/mean"] = fmean(each.result.is_truncated for each in done)

    stops = Counter(each.result.stop_condition for each in done)
    for condition, number in sorted(stops.items(), key=str):
        if condition:
            shares[f"stop_condition/{condition}"] = number / len(done)

    failures = Counter(each.result.error_type for each in finished if not each.result.ok)
    for kind, number in sorted(failures.items(), key=str):
        shares[f"error/{kind}"] = float(number)
    return shares


def standard_error(groups: Sequence[Sequence[float]]) -> float:
    """Standard error of the mean reward, over at least two examples: rollouts of one example are
    alike, so each example's mean counts as one observation (Miller 2024, arXiv 2411.00640, section
    2.2, for groups of one size)."""
    return stdev(fmean(rewards) for rewards in groups) / sqrt(len(groups))


def pass_rates(groups: Sequence[Sequence[float]]) -> Reduced:
    """``avg@n`` of each example's n rewards; where every reward is 0 or 1, but for rounding,
    unbiased ``pass@k`` and ``pass^k`` too, for k = 1, 2, 4 ... n.

    With c of n right: pass@k = 1 - C(n - c, k) / C(n, k), at least one of k is right (Chen et al.
    2021, arXiv 2107.03374, eq. 1); pass^k = C(c, k) / C(n, k), all k are (Yao et al. 2024, arXiv
    2406.12045, section 4). Examples with fewer than k rollouts are left out of k.

    A failed rollout counts as wrong (``Finished.reward``): else a policy that times out on its hard
    examples would score better. ``eval/<env>/num_failed`` is their number.
    """
    if not groups:
        return {}

    most = max(map(len, groups))
    rates = {f"avg@{most}": fmean(fmean(rewards) for rewards in groups)}
    groups = [[settled(reward) for reward in rewards] for rewards in groups]
    if any(reward not in (0.0, 1.0) for rewards in groups for reward in rewards):
        return rates

    for power in range(most.bit_length()):
        k = 2**power
        counts = [(len(rewards), int(sum(rewards))) for rewards in groups if len(rewards) >= k]
        rates[f"pass@{k}"] = fmean(1 - comb(n - c, k) / comb(n, k) for n, c in counts)
        rates[f"pass^{k}"] = fmean(comb(c, k) / comb(n, k) for n, c in counts)

    return rates


def num_tokens(result: RolloutResult) -> tuple[int, int]:
    """Tokens given to the policy and sampled by it; nodes that branches share count once. Without
    token ids: as counted by the server."""
    if not any(branch.token_ids for branch in result.branches):
        return result.usage

    seen: set[int] = set()
    num_given = 0
    num_sampled = 0
    for branch in result.branches:
        pairs = zip(branch.node_ids, branch.sampled_mask, strict=True)
        fresh = [is_sampled for node, is_sampled in pairs if node not in seen]
        num_sampled += sum(fresh)
        num_given += len(fresh) - sum(fresh)
        seen.update(branch.node_ids)

    return num_given, num_sampled
