"""Rewards of a whole group: called in the orchestrator, where siblings meet. Imports no verifiers.

A failure is data, as that of any reward: the group gets no credit and is not trained.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from function.rewards import (
    COMPLETION_IDS,
    MESSAGES,
    PROMPT,
    REPLIES,
    RewardFault,
    RewardFunction,
    added,
    check_weighted,
    faults_of,
    terms_of_group,
)
from prime_rl import Group, Rollout, log_metric, settled

KEY = "group_rewards"
TERMS = "group_reward_terms"
"""Field of a scored rollout's ``task``: its terms, so that a replay does not call the functions."""

FAILED = "group_reward_failed"
"""Metric: the share of groups whose group reward has failed."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class GroupRewards:
    """The group rewards of an env, and its rows."""

    functions: Sequence[RewardFunction]
    weights: Mapping[str, float]
    rows: Sequence[Mapping[str, Any]]


_REGISTERED: dict[str, GroupRewards] = {}


def register(
    functions: Sequence[RewardFunction],
    weights: Mapping[str, float],
    rows: Sequence[Mapping[str, Any]],
    origin: Any,
) -> str | None:
    """Remember an env's group rewards in this process. Returns the key of its rows; None: it has
    none. ``origin``: the args of the env, the same in each process of the run."""
    group = [each for each in functions if each.is_group]
    if not group:
        return None
    facts = repr((origin, sorted(weights.items())))
    key = hashlib.sha256(facts.encode()).hexdigest()[:16]
    _REGISTERED[key] = GroupRewards(group, dict(weights), rows)
    return key


async def score(group: Group) -> None:
    """Add the group rewards to the rollouts' rewards, before the algorithm gives credit."""
    key = group[0].task.get(KEY)
    if key is None:
        return
    if key in _REGISTERED:
        rewards = _REGISTERED[key]
        try:
            terms = await _terms(rewards, group)
        except RewardFault as fault:
            log.warning(
                "env %r, group %d (row %d): it will not train: %s",
                *(group[0].env, group[0].group_id, group[0].example_id + 1, fault),
            )
            log_metric(FAILED, 1.0)
            for rollout in group:
                rollout.reward = 0.0
                rollout.assign_weights("rl", 0.0)
            return
        log_metric(FAILED, 0.0)
        for rollout, named in zip(group, terms, strict=True):
            rollout.task = rollout.task | {TERMS: [named, _weights(named, rewards.weights)]}
    elif not all(TERMS in rollout.task for rollout in group):
        raise RewardFault(
            f"env {group[0].env!r}: its group rewards are not loaded in this process, and the "
            "rollouts do not have their terms"
        )

    for rollout in group:
        named, by_term = rollout.task[TERMS]
        _add(rollout, named, by_term)


def _weights(terms: Mapping[str, float], weights: Mapping[str, float]) -> dict[str, float]:
    return {name: weights.get(name, 1.0) for name in terms}


def _add(rollout: Rollout, terms: Mapping[str, float], weights: Mapping[str, float]) -> None:
    rollout.rewards = rollout.rewards | dict(terms)
    total = rollout.reward + sum(settled(value) * weights[name] for name, value in terms.items())
    rollout.reward = settled(total)


async def _terms(rewards: GroupRewards, group: Group) -> list[dict[str, float]]:
    """The terms of each rollout. Raises ``RewardFault``."""
    available = _available(rewards.rows[group[0].example_id], group)
    calls = [_call(each, available, len(group)) for each in rewards.functions]
    results = await asyncio.gather(*calls)
    terms: list[dict[str, float]] = []
    for rollout, of_one in zip(group, zip(*results, strict=True), strict=True):
        every = added([rollout.rewards, *of_one])
        check_weighted(every, rewards.weights)
        terms.append(added(of_one))
    return terms


async def _call(
    function: RewardFunction, available: Mapping[str, Any], num_replies: int
) -> list[dict[str, float]]:
    if _is_async(function.function):
        from prime_rl.env.environment import contained

        # Also of a task that the function starts: its exit would end the orchestrator's loop.
        with faults_of(function), contained():
            result = await function(**available)
    else:  # it must not block the event loop of the orchestrator
        result = await asyncio.to_thread(_run, function, available)
    with faults_of(function):
        return terms_of_group(function, result, num_replies)


def _run(function: RewardFunction, available: Mapping[str, Any]) -> Any:
    """Call a function in this thread. An exit must not get into the event loop's: it would end
    that, wherever it is caught."""
    with faults_of(function):
        return asyncio.run(function(**available))


def _is_async(function: Any) -> bool:
    inner = function
    while hasattr(inner, "func") and not hasattr(inner, "__name__"):  # functools.partial
        inner = inner.func
    return inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(
        getattr(inner, "__call__", None)  # noqa: B004 - whether calling it gives a coroutine
    )


def _available(row: Mapping[str, Any], group: Group) -> dict[str, Any]:
    """What a group reward may take: siblings share the prompt and the row."""
    return dict(row) | {
        REPLIES: [rollout.reply for rollout in group],
        PROMPT: group[0].prompt,
        MESSAGES: [rollout.messages for rollout in group],
        COMPLETION_IDS: [_sampled_ids(rollout) for rollout in group],
    }


def _sampled_ids(rollout: Rollout) -> list[int]:
    return [
        int(token) for sample in rollout.samples for token in sample.token_ids[sample.loss_mask]
    ]
