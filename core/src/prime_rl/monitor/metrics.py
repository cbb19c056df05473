"""Names and reductions of what the orchestrator reports: ``group/name``, per env and over all."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

from prime_rl.rollout import Rollout

Reduced = dict[str, float]


def describe(values: Sequence[float], name: str) -> Reduced:
    """``name/{mean,max,min,p10,p90}`` of some values; nothing of none."""
    if not values:
        return {}
    column = np.asarray(values, np.float64)
    p10, p90 = np.percentile(column, (10, 90))
    return {
        f"{name}/mean": float(column.mean()),
        f"{name}/max": float(column.max()),
        f"{name}/min": float(column.min()),
        f"{name}/p10": float(p10),
        f"{name}/p90": float(p90),
    }


def rollout_metrics(rollouts: Sequence[Rollout], subset: str, prefix: str = "train") -> Reduced:
    """Reward, lengths and turns of some rollouts, over all envs (``agg``) and each env by
    itself."""
    by_env: dict[str, list[Rollout]] = defaultdict(list)
    for rollout in rollouts:
        by_env[rollout.env].append(rollout)
    metrics: Reduced = {}
    for label, members in [("agg", list(rollouts)), *sorted(by_env.items())]:
        metrics |= _one_env(members, f"{prefix}/{label}/{subset}")
    return metrics


def _one_env(rollouts: Sequence[Rollout], name: str) -> Reduced:
    rewarded = _rewarded(rollouts)
    columns: dict[str, Sequence[float]] = {
        "reward": [rollout.reward for rollout in rewarded],
        "num_total_tokens": [rollout.num_tokens for rollout in rollouts],
        "num_input_tokens": [rollout.num_input_tokens for rollout in rollouts],
        "num_output_tokens": [rollout.num_trainable_tokens for rollout in rollouts],
        "num_turns": [rollout.num_turns for rollout in rollouts],
        "num_branches": [len(rollout.samples) for rollout in rollouts],
    }
    metrics: Reduced = {}
    for key, values in columns.items():
        metrics |= describe(values, f"{name}/{key}")
    if rollouts:
        metrics[f"{name}/is_truncated/mean"] = _mean(rollout.is_truncated for rollout in rollouts)
        metrics[f"{name}/samples_per_rollout/mean"] = _mean(len(r.samples) for r in rollouts)
    for kind in ("rewards", "metrics"):
        metrics |= _named(rewarded, kind, name)
    return metrics


def _rewarded(rollouts: Sequence[Rollout]) -> list[Rollout]:
    """Those whose reward says how well the policy does: what it sampled now. A frozen model's count
    where there are no others; demonstrations and past experience never."""
    live = [rollout for rollout in rollouts if rollout.is_live]
    return live or [rollout for rollout in rollouts if rollout.source == "frozen"]


def _named(rollouts: Sequence[Rollout], kind: str, name: str) -> Reduced:
    """The env's own terms: ``rewards/<term>/mean`` and ``metrics/<term>/mean``."""
    terms: dict[str, list[float]] = defaultdict(list)
    for rollout in rollouts:
        for term, value in getattr(rollout, kind).items():
            terms[term].append(value)
    return {f"{name}/{kind}/{term}/mean": _mean(values) for term, values in sorted(terms.items())}


def group_metrics(groups: Iterable[Sequence[float]], name: str) -> Reduced:
    """Shares of groups whose rewards are all zero, all one, or neither."""
    kinds: Counter[str] = Counter()
    for rewards in groups:
        kinds[
            "solved_none"
            if not any(rewards)
            else "solved_all"
            if min(rewards) >= 1
            else "solved_some"
        ] += 1
    total = sum(kinds.values())
    names = ("solved_none", "solved_all", "solved_some")
    return {f"{name}/{kind}": kinds[kind] / total for kind in names} if total else {}


def off_policy_metrics(staleness: Sequence[int]) -> Reduced:
    """How many versions behind the weights they train the batch's rollouts are."""
    if not staleness:
        return {}
    return {"off_policy/mean": _mean(staleness), "off_policy/max": float(max(staleness))}


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed) if listed else 0.0
