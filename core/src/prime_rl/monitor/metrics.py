"""Names and reductions of the orchestrator's metrics: ``group/name``, per env and over all envs.

``train/A/all`` covers every rollout considered for the batch, ``train/A/effective`` those that
train; A is an env's label, or ``agg`` for all envs together.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from prime_rl.rollout import Rollout

Reduced = dict[str, float]


def describe(values: Sequence[float], name: str) -> Reduced:
    """``name/{mean,max,min,p10,p90}`` of some values; empty without values."""
    if not values:
        return {}
    column = np.sort(np.asarray(values, np.float64))
    return {
        f"{name}/mean": float(column.mean()),
        f"{name}/max": float(column[-1]),
        f"{name}/min": float(column[0]),
        f"{name}/p10": _percentile(column, 0.1),
        f"{name}/p90": _percentile(column, 0.9),
    }


def _percentile(column: npt.NDArray[np.float64], share: float) -> float:
    """Percentile of a sorted column, by linear interpolation, at a tenth of the cost of
    ``np.percentile``."""
    place = share * (len(column) - 1)
    below = int(place)
    above = min(below + 1, len(column) - 1)
    return float(column[below] + (place - below) * (column[above] - column[below]))


def rollout_metrics(rollouts: Sequence[Rollout], subset: str, prefix: str = "train") -> Reduced:
    """Reward, lengths and turns of some rollouts, over all envs (``agg``) and per env."""
    by_env: dict[str, list[Rollout]] = defaultdict(list)
    for rollout in rollouts:
        by_env[rollout.env].append(rollout)
    metrics: Reduced = {}
    for label, members in [("agg", list(rollouts)), *sorted(by_env.items())]:
        metrics |= describe_rollouts(members, f"{prefix}/{label}/{subset}")
    return metrics


def describe_rollouts(rollouts: Sequence[Rollout], name: str) -> Reduced:
    """Reward, lengths, turns and stop conditions of some rollouts, as ``name/...``."""
    rewarded = _rewarded(rollouts)
    totals = [rollout.num_tokens for rollout in rollouts]
    outputs = [rollout.num_trainable_tokens for rollout in rollouts]
    columns: dict[str, Sequence[float]] = {
        "reward": [rollout.reward for rollout in rewarded],
        "num_total_tokens": totals,
        "num_input_tokens": [total - own for total, own in zip(totals, outputs, strict=True)],
        "num_output_tokens": outputs,
        "num_turns": [rollout.num_turns for rollout in rollouts],
        "num_branches": [len(rollout.samples) for rollout in rollouts],
    }
    metrics: Reduced = {}
    for key, values in columns.items():
        metrics |= describe(values, f"{name}/{key}")
    if rollouts:
        metrics[f"{name}/is_truncated/mean"] = _mean(rollout.is_truncated for rollout in rollouts)
        metrics[f"{name}/samples_per_rollout/mean"] = _mean(len(r.samples) for r in rollouts)
        stops = Counter(rollout.stop_condition for rollout in rewarded)
        for condition, count in sorted((str(stop), n) for stop, n in stops.items() if stop):
            metrics[f"{name}/stop_condition/{condition}"] = count / len(rewarded)
    for kind in ("rewards", "metrics"):
        metrics |= _named(rewarded, kind, name)
    return metrics


def _rewarded(rollouts: Sequence[Rollout]) -> list[Rollout]:
    """Rollouts whose reward measures the policy: those it has just sampled. Those of a frozen model
    count if there are no others; demonstrations and replayed rollouts never count."""
    live = [rollout for rollout in rollouts if rollout.is_live]
    return live or [rollout for rollout in rollouts if rollout.source == "frozen"]


def _named(rollouts: Sequence[Rollout], kind: str, name: str) -> Reduced:
    """The env's own terms, ``rewards/<term>/...`` and ``metrics/<term>/...``, over the rollouts
    that have each term."""
    terms: dict[str, list[float]] = defaultdict(list)
    for rollout in rollouts:
        for term, value in getattr(rollout, kind).items():
            terms[term].append(value)
    metrics: Reduced = {}
    for term, values in sorted(terms.items()):
        metrics |= describe(values, f"{name}/{kind}/{term}")
    return metrics


def outcome_metrics(
    counts: Mapping[str, Mapping[str, int]], cancelled: Mapping[str, int] | None = None
) -> Reduced:
    """Outcomes of the rollouts that ended since the last step.

    ``counts`` has, by env, the number ``finished`` and the failures by class, ``error/<class>``;
    ``cancelled`` the number cancelled by env. Returns fractions of the rollouts that ended,
    ``.../is_completed/mean``, ``.../has_error/mean`` and ``.../cancelled/mean``, and the number of
    failures, ``.../error/<class>``.
    """
    total: Counter[str] = Counter()
    by_env: dict[str, Counter[str]] = {}
    for env in sorted({*counts, *(cancelled or {})}):
        by_env[env] = Counter(counts.get(env, {}))
        by_env[env]["cancelled"] += (cancelled or {}).get(env, 0)
        total.update(by_env[env])
    metrics: Reduced = {}
    for label, ended in [("agg", total), *by_env.items()]:
        metrics |= _outcomes(ended, f"train/{label}/all")
    return metrics


def _outcomes(ended: Mapping[str, int], name: str) -> Reduced:
    number = sum(ended.values())
    if not number:
        return {}
    errors = {kind: n for kind, n in ended.items() if kind.startswith("error/")}
    metrics = {
        f"{name}/is_completed/mean": ended.get("finished", 0) / number,
        f"{name}/has_error/mean": sum(errors.values()) / number,
        f"{name}/cancelled/mean": ended.get("cancelled", 0) / number,
    }
    return metrics | {f"{name}/{kind}": float(n) for kind, n in sorted(errors.items())}


def solved_metrics(groups: Sequence[tuple[str, Sequence[float]]], subset: str = "all") -> Reduced:
    """``group_metrics`` of ``(env, rewards)``, over all envs and per env."""
    by_env: dict[str, list[Sequence[float]]] = defaultdict(list)
    for env, rewards in groups:
        by_env[env].append(rewards)
    metrics = group_metrics((rewards for _, rewards in groups), f"train/agg/{subset}")
    for env, members in sorted(by_env.items()):
        metrics |= group_metrics(members, f"train/{env}/{subset}")
    return metrics


def group_metrics(groups: Iterable[Sequence[float]], name: str) -> Reduced:
    """Fractions of groups whose rewards are all zero, all one, or neither."""
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


def off_policy_metrics(staleness: Sequence[int], in_flight: Sequence[int | None] = ()) -> Reduced:
    """Staleness of the batch's rollouts: versions between sampling and training.

    ``in_flight``: versions published while each rollout was sampled (None: unknown); the others
    were published while it waited in the queue. ``off_policy/behind/N``: the fraction of the batch
    that is N versions behind.
    """
    if not staleness:
        return {}
    metrics = mean_and_max(staleness, "off_policy")
    known = [(age, own) for age, own in zip(staleness, in_flight, strict=False) if own is not None]
    if known:
        metrics |= mean_and_max([own for _, own in known], "off_policy/in_flight")
        metrics |= mean_and_max([age - own for age, own in known], "off_policy/in_queue")
    for age, count in sorted(Counter(staleness).items()):
        metrics[f"off_policy/behind/{age}"] = count / len(staleness)
    return metrics


def batch_metrics(seen: Sequence[Rollout], kept: Sequence[Rollout]) -> Reduced:
    """Composition of the batch: ``batch/A`` is env A's fraction of the rollouts that train,
    ``batch/A/seen`` and ``batch/A/trainable`` are counts."""
    seen_by, kept_by = (Counter(r.env for r in rollouts) for rollouts in (seen, kept))
    metrics = {"batch/agg/seen": float(len(seen)), "batch/agg/trainable": float(len(kept))}
    for env in sorted(seen_by | kept_by):
        metrics[f"batch/{env}"] = kept_by[env] / max(len(kept), 1)
        metrics[f"batch/{env}/seen"] = float(seen_by[env])
        metrics[f"batch/{env}/trainable"] = float(kept_by[env])
    return metrics


def timing_metrics(
    timings: Sequence[tuple[str, Mapping[str, float]]], subset: str = "all"
) -> Reduced:
    """Seconds a rollout spent by stage, of ``(env, seconds by stage)``: ``.../timing/<stage>/...``,
    over all envs and by env; ``total`` is their sum, ``agent/...`` are parts of ``agent``."""
    columns: dict[str, list[float]] = defaultdict(list)
    for env, stages in timings:
        whole = {stage: seconds for stage, seconds in stages.items() if "/" not in stage}
        for stage, seconds in {**stages, "total": sum(whole.values())}.items():
            for label in ("agg", env):
                columns[f"train/{label}/{subset}/timing/{stage}"].append(seconds)
    metrics: Reduced = {}
    for name, values in columns.items():
        metrics |= describe(values, name)
    return metrics


class Progress:
    """``progress/...``: counts of this step, and totals since the start."""

    def __init__(self) -> None:
        self._totals: Counter[str] = Counter()
        self._examples: set[tuple[str, int]] = set()

    def step(self, seen: Sequence[Rollout]) -> Reduced:
        """Count the rollouts considered for one batch. A task is an example of an env; the total
        counts each once."""
        examples = {(rollout.env, rollout.example_id) for rollout in seen}
        self._examples |= examples
        tokens = sum(rollout.num_tokens for rollout in seen)
        sampled = sum(rollout.num_trainable_tokens for rollout in seen)
        now = {
            "tokens": tokens,
            "input_tokens": tokens - sampled,
            "output_tokens": sampled,
            "rollouts": len(seen),
        }
        self._totals.update(now)
        metrics = {f"progress/{name}": float(n) for name, n in now.items()}
        metrics |= {f"progress/total_{name}": float(n) for name, n in self._totals.items()}
        metrics["progress/tasks"] = float(len(examples))
        metrics["progress/total_tasks"] = float(len(self._examples))
        return metrics


def mean_and_max(values: Sequence[float], name: str) -> Reduced:
    """``name/{mean,max}`` of some values; empty without values."""
    return {f"{name}/mean": _mean(values), f"{name}/max": float(max(values))} if values else {}


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed) if listed else 0.0
