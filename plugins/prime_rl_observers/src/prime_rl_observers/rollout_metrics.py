"""Names and reductions of the orchestrator's metrics: ``group/name``, per env and over all envs.

``train/A/all`` covers every rollout considered for the batch, ``train/A/effective`` those that
train; A is an env's label, or ``agg`` for all envs together.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from prime_rl import at_least
from prime_rl.orchestrator.buffer import LEFT_OUT, REJECTED, STALE
from prime_rl.rollout import Batch, Rollout

Reduced = dict[str, float]
T = TypeVar("T")


def by_label(members: Iterable[tuple[str, T]]) -> list[tuple[str, list[T]]]:
    """``(env, member)`` pairs as the members of all envs, ``agg``, and then of each env."""
    by_env: dict[str, list[T]] = defaultdict(list)
    listed = list(members)
    for env, member in listed:
        by_env[env].append(member)
    return [("agg", [member for _, member in listed]), *sorted(by_env.items())]


def describe(values: Sequence[float], name: str) -> Reduced:
    """``name/{mean,max,min,p10,p90}`` of some values; empty without values."""
    if not values:
        return {}
    column = np.sort(np.asarray(values, np.float64))

    def percentile(share: float) -> float:  # at a tenth of the cost of np.percentile
        place = share * (len(column) - 1)
        below = int(place)
        above = min(below + 1, len(column) - 1)
        return float(column[below] + (place - below) * (column[above] - column[below]))

    return {
        f"{name}/mean": float(column.mean()),
        f"{name}/max": float(column[-1]),
        f"{name}/min": float(column[0]),
        f"{name}/p10": percentile(0.1),
        f"{name}/p90": percentile(0.9),
    }


def rollout_metrics(rollouts: Sequence[Rollout], subset: str, prefix: str = "train") -> Reduced:
    """``describe_rollouts`` over all envs and per env; of an env whose rollouts are of several
    agents, per agent too: ``.../agents/AGENT/...``."""
    metrics: Reduced = {}
    for label, members in by_label((rollout.env, rollout) for rollout in rollouts):
        name = f"{prefix}/{label}/{subset}"
        metrics |= describe_rollouts(members, name)
        agents = sorted({rollout.agent for rollout in members})
        for agent in agents if label != "agg" and len(agents) > 1 else ():
            of_agent = [rollout for rollout in members if rollout.agent == agent]
            metrics |= describe_rollouts(of_agent, f"{name}/agents/{agent}")
    return metrics


def describe_rollouts(rollouts: Sequence[Rollout], name: str) -> Reduced:
    """Reward, lengths, turns and stop conditions of some rollouts, as ``name/...``, and the env's
    own terms, ``name/rewards/<term>/...`` and ``name/metrics/<term>/...``."""
    if not rollouts:
        return {}
    # A reward measures the policy if the policy has just sampled the rollout. Rollouts of a frozen
    # model count if there are no others; demonstrations and replayed rollouts never count.
    rewarded = [rollout for rollout in rollouts if rollout.is_live]
    rewarded = rewarded or [rollout for rollout in rollouts if rollout.source == "frozen"]
    columns: dict[str, list[float]] = {
        "reward": [rollout.reward for rollout in rewarded],
        "num_total_tokens": [rollout.num_tokens for rollout in rollouts],
        "num_input_tokens": [r.num_tokens - r.num_trainable_tokens for r in rollouts],
        "num_output_tokens": [rollout.num_trainable_tokens for rollout in rollouts],
        "num_turns": [rollout.num_turns for rollout in rollouts],
        "num_branches": [len(rollout.samples) for rollout in rollouts],
    }
    for rollout in rewarded:  # each term over the rollouts that have it
        for kind, terms in (("rewards", rollout.rewards), ("metrics", rollout.metrics)):
            for term, value in terms.items():
                columns.setdefault(f"{kind}/{term}", []).append(value)

    metrics: Reduced = {
        f"{name}/is_truncated/mean": _mean(rollout.is_truncated for rollout in rollouts),
        f"{name}/samples_per_rollout/mean": _mean(columns["num_branches"]),
    }
    for key, values in columns.items():
        metrics |= describe(values, f"{name}/{key}")
    stops = Counter(str(rollout.stop_condition) for rollout in rewarded if rollout.stop_condition)
    for condition, count in sorted(stops.items()):
        metrics[f"{name}/stop_condition/{condition}"] = count / len(rewarded)
    return metrics


def outcome_metrics(
    counts: Mapping[str, Mapping[str, int]], cancelled: Mapping[str, int] | None = None
) -> Reduced:
    """Outcomes of the rollouts that ended since the last step.

    ``counts`` has, by env, the numbers ``finished`` and ``stopped``, and the failures by class,
    ``error/<class>``; ``cancelled`` the number cancelled by env. Returns fractions of the rollouts
    that ended, ``.../is_completed/mean``, ``.../has_error/mean`` and ``.../cancelled/mean``, also
    ``.../stopped/mean`` if any was stopped, and the number of failures, ``.../error/<class>``.
    """
    outcomes = [
        *((env, Counter(ended)) for env, ended in counts.items()),
        *((env, Counter(cancelled=number)) for env, number in (cancelled or {}).items()),
    ]
    metrics: Reduced = {}
    for label, counters in by_label(outcomes):
        ended = sum(counters, Counter[str]())
        number = ended.total()
        name = f"train/{label}/all"
        if not number:
            continue
        errors = {kind: n for kind, n in sorted(ended.items()) if kind.startswith("error/")}
        metrics |= {
            f"{name}/is_completed/mean": ended["finished"] / number,
            f"{name}/has_error/mean": sum(errors.values()) / number,
            f"{name}/cancelled/mean": ended["cancelled"] / number,
            **{f"{name}/{kind}": float(n) for kind, n in errors.items()},
        }
        if ended["stopped"]:
            metrics[f"{name}/stopped/mean"] = ended["stopped"] / number

    return metrics


class Ended(NamedTuple):
    """A rollout that was requested, and how it ended."""

    env: str
    lost: str | None
    """``age``, ``failure`` or ``time``; None: it had its chance to train."""
    output_tokens: float | None = None
    """These three as far as it came; None: unknown."""
    turns: float | None = None
    reward: float | None = None


def lost_metrics(ended: Sequence[Ended]) -> Reduced:
    """Lost rollouts compared with dispatched ones, over all envs and per env: the shares
    ``lost/A/{age,failure,time}``, and means of both, ``lost/A/NAME/mean`` and
    ``dispatched/A/NAME/mean``. Filters are not losses."""
    metrics: Reduced = {}
    for label, members in by_label((each.env, each) for each in ended):
        lost = [each for each in members if each.lost]
        for reason in ("age", "failure", "time") if members else ():
            share = sum(each.lost == reason for each in lost) / len(members)
            metrics[f"lost/{label}/{reason}"] = share

        for name in Ended._fields[2:] if lost else ():
            for kind, some in (("lost", lost), ("dispatched", members)):
                values = [getattr(each, name) for each in some]
                known = [value for value in values if value is not None]
                if known:
                    metrics[f"{kind}/{label}/{name}/mean"] = _mean(known)

    return metrics


def solved_metrics(groups: Sequence[tuple[str, Sequence[float]]], subset: str = "all") -> Reduced:
    """Fractions of groups, ``(env, rewards)``, whose rewards are all zero, all one, or neither:
    over all envs and per env."""
    metrics: Reduced = {}
    for label, members in by_label(groups):
        kinds = Counter(
            "none" if not any(rewards) else "all" if at_least(min(rewards), 1) else "some"
            for rewards in members
        )
        if kinds:
            for kind in ("none", "all", "some"):
                metrics[f"train/{label}/{subset}/solved_{kind}"] = kinds[kind] / kinds.total()

    return metrics


def off_policy_metrics(staleness: Sequence[int], in_flight: Sequence[int | None] = ()) -> Reduced:
    """Staleness of the batch's rollouts: versions between sampling and training.

    ``in_flight``: versions published while each rollout was sampled (None: unknown); the others
    were published while it waited in the queue. ``off_policy/behind/N``: the fraction of the batch
    that is N versions behind.
    """
    if not staleness:
        return {}
    metrics = mean_and_max(staleness, "off_policy")
    pairs = zip(staleness, in_flight, strict=False)
    known = [(age, while_sampled) for age, while_sampled in pairs if while_sampled is not None]
    if known:
        flight = [while_sampled for _, while_sampled in known]
        queue = [age - while_sampled for age, while_sampled in known]
        metrics |= mean_and_max(flight, "off_policy/in_flight")
        metrics |= mean_and_max(queue, "off_policy/in_queue")

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


def dropped_metrics(batch: Batch) -> Reduced:
    """How the rollouts ended that were decided on and do not train, as counts over all envs and per
    env: ``batch/A/dropped/{stale,sampler,left_out}`` and ``batch/A/dropped/SLOT/NAME`` of a filter.
    A rollout that several filters dropped counts for each of them."""
    ends = []
    for rollout in batch.seen:
        place = batch.dropped.get(id(rollout))
        objectors = batch.objections.get(id(rollout), {})
        if place in (STALE, REJECTED):
            ends.append((rollout.env, place))
        elif place == LEFT_OUT:
            ends.append((rollout.env, "left_out"))
        elif place is not None:
            ends += [(rollout.env, f"{place}/{name}") for name in objectors]

    return {
        f"batch/{label}/dropped/{end}": float(count)
        for label, ends_of_label in by_label(ends)
        for end, count in sorted(Counter(ends_of_label).items())
    }


def timing_metrics(
    timings: Sequence[tuple[str, Mapping[str, float]]], subset: str = "all"
) -> Reduced:
    """Seconds that a rollout spent in each stage, from ``(env, seconds by stage)``:
    ``.../timing/<stage>/...``, over all envs and per env. ``agent/...`` are parts of ``agent``;
    ``total`` is the sum of the others."""
    metrics: Reduced = {}
    for label, members in by_label(timings):
        columns: dict[str, list[float]] = defaultdict(list)
        for stages in members:
            total = sum(seconds for stage, seconds in stages.items() if "/" not in stage)
            for stage, seconds in {**stages, "total": total}.items():
                columns[stage].append(seconds)
        for stage, values in columns.items():
            metrics |= describe(values, f"train/{label}/{subset}/timing/{stage}")

    return metrics


class ProgressCounts:
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
