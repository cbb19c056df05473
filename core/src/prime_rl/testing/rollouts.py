"""Small rollouts for tests."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from prime_rl.rollout import ROLES, Rollout, Sample


def make_rollout(
    reward: float = 0.0,
    *,
    prompt: int = 2,
    completion: int = 3,
    tool: int = 0,
    env: str = "test",
    group_id: int = 0,
) -> Rollout:
    """One rollout of one sample: ``prompt`` user tokens, ``completion`` sampled ones, then ``tool``
    observed ones."""
    sample = make_sample(prompt=prompt, completion=completion, tool=tool)
    return Rollout(env=env, example_id=0, group_id=group_id, reward=reward, samples=[sample])


def make_sample(*, prompt: int = 2, completion: int = 3, tool: int = 0) -> Sample:
    """One token sequence; token ids count from 0, every sampled token has logprob -1.0."""
    roles = ["user"] * prompt + ["assistant"] * completion + ["tool"] * tool
    mask = np.array([role == "assistant" for role in roles], np.bool_)
    return Sample(
        token_ids=np.arange(len(roles), dtype=np.int32),
        loss_mask=mask,
        inference_logprobs=np.where(mask, np.float32(-1.0), np.float32(0.0)),
        roles=np.array([ROLES.index(role) for role in roles], np.int8),
        is_content=np.ones(len(roles), np.bool_),
        policy_versions=np.where(mask, np.int32(0), np.int32(-1)),
    )


def make_group(
    rewards: Iterable[float], *, prompt: int = 2, completion: int = 3, tool: int = 0
) -> list[Rollout]:
    """Sibling rollouts with these rewards."""
    return [
        make_rollout(reward, prompt=prompt, completion=completion, tool=tool) for reward in rewards
    ]


TASK = {"prompt": "2 + 2?", "answer": "4", "demonstration": "4"}
"""Fields of the example that the kit's rollouts come from."""


def conformance_group(rewards: Iterable[float]) -> list[Rollout]:
    """The groups of ``check_algorithm``: siblings of two samples each, the first with an observed
    tool message. Two samples expose an algorithm that reads the first only."""
    group = make_group(rewards, tool=2)
    for rollout in group:
        rollout.samples.append(make_sample(prompt=1, completion=2))
        rollout.num_turns = 2
        rollout.task = dict(TASK)
    return group
