"""From a finished episode to samples: one sample per branch; a shared sampled token trains once.

A trajectory is a tree of messages. While each turn's prompt extends the previous tokens exactly,
its branch grows and stays one sample; where it does not (thinking stripped, a hand-over to a
sub-agent), a new branch starts. A node on several branches trains in the first of them only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from prime_rl.env.episode import BranchTokens, RolloutResult
from prime_rl.errors import StreamError
from prime_rl.rollout import ROLES, Rollout, Sample
from prime_rl.streams import BoolColumn

_ROLE_INDEX = {role: index for index, role in enumerate(ROLES)}


def build_rollout(
    result: RolloutResult,
    *,
    env: str,
    example_id: int,
    group_id: int,
    policy_version: int,
    temperature: float,
) -> Rollout:
    """The rollout that plugins see of one successful episode."""
    return Rollout(
        env=env,
        example_id=example_id,
        group_id=group_id,
        reward=result.reward,
        samples=build_samples(result.branches, temperature),
        rewards=dict(result.rewards),
        metrics=dict(result.metrics),
        info=dict(result.info),
        num_turns=result.num_turns,
        is_truncated=result.is_truncated,
        stop_condition=result.stop_condition,
        policy_version=policy_version,
        agent=result.agent,
        trace=result.trace,
    )


def build_samples(branches: Sequence[BranchTokens], temperature: float) -> list[Sample]:
    """The samples of one episode, in the order of their first sampled turns; branches with nothing
    left to train have none."""
    seen: set[int] = set()
    samples = []
    for branch in sorted(branches, key=_first_turn):
        if not branch.trainable:
            continue
        repeats = np.isin(np.asarray(branch.node_ids, np.int64), list(seen))
        mask = np.asarray(branch.sampled_mask, np.bool_) & ~repeats
        if mask.any():
            samples.append(_sample(branch, mask, repeats, temperature))
            seen.update(branch.node_ids)
    return samples


def _first_turn(branch: BranchTokens) -> int:
    """The node of its first sampled token: nodes are numbered in time order."""
    sampled = (n for n, mine in zip(branch.node_ids, branch.sampled_mask, strict=True) if mine)
    return next(sampled, -1)


def _sample(
    branch: BranchTokens, mask: BoolColumn, repeats: BoolColumn, temperature: float
) -> Sample:
    logprobs = np.asarray(branch.logprobs, np.float32)
    if not np.isfinite(logprobs[mask]).all():
        raise StreamError(
            "a sampled token has a logprob that is not finite; the engine must return the logprob "
            "of the sampling distribution"
        )
    versions = branch.policy_versions
    return Sample(
        token_ids=np.asarray(branch.token_ids, np.int32),
        loss_mask=mask,
        inference_logprobs=np.where(mask, logprobs, np.float32(0.0)),
        temperature=temperature,
        roles=np.array([_ROLE_INDEX.get(role, -1) for role in branch.roles], np.int8),
        is_content=_content(branch.is_content),
        is_repeat=repeats if repeats.any() else None,
        node_ids=np.asarray(branch.node_ids, np.int32),
        policy_versions=None
        if versions is None
        else np.where(mask, np.asarray(versions, np.int32), np.int32(-1)),
    )


def _content(flags: Sequence[bool | None] | None) -> npt.NDArray[Any] | None:
    """The renderer's attribution. A message without one counts as body as a whole; None: no message
    has one."""
    if flags is None or all(flag is None for flag in flags):
        return None
    return np.array([flag is not False for flag in flags], np.bool_)
