"""What a plugin's own tests need: small rollouts, real hook calls, and the promises every algorithm
keeps."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import numpy as np

from prime_rl.orchestrator.scoring import score_group, score_rollout, stamp
from prime_rl.plugins.base import Algorithm
from prime_rl.plugins.manager import Hooks, scope
from prime_rl.rollout import ROLES, STREAMS, Group, Rollout, Sample


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
    roles = ["user"] * prompt + ["assistant"] * completion + ["tool"] * tool
    mask = np.array([role == "assistant" for role in roles], np.bool_)
    sample = Sample(
        token_ids=np.arange(len(roles), dtype=np.int32),
        loss_mask=mask,
        inference_logprobs=np.where(mask, np.float32(-1.0), np.float32(0.0)),
        roles=np.array([ROLES.index(role) for role in roles], np.int8),
        is_content=np.ones(len(roles), np.bool_),
        policy_versions=np.where(mask, np.int32(0), np.int32(-1)),
    )
    return Rollout(env=env, example_id=0, group_id=group_id, reward=reward, samples=[sample])


def make_group(
    rewards: Iterable[float], *, prompt: int = 2, completion: int = 3, tool: int = 0
) -> list[Rollout]:
    """Sibling rollouts with these rewards."""
    return [
        make_rollout(reward, prompt=prompt, completion=completion, tool=tool) for reward in rewards
    ]


def score(algorithm: Algorithm, group: Group, *plugins: object) -> None:
    """Run every scoring hook as the orchestrator does, wrappers of ``plugins`` included."""

    async def run() -> None:
        hooks = scope("test", Hooks(), own=[*plugins, algorithm])
        await algorithm.setup()
        for rollout in group:
            await score_rollout(hooks, rollout)
        await score_group(hooks, group)
        await algorithm.close()

    asyncio.run(run())


def check_algorithm(algorithm: Algorithm) -> None:
    """The promises every algorithm keeps, whatever its signal. Raises ``AssertionError`` naming the
    broken one."""
    for rewards in ([1.0, 0.0], [1.0, 1.0], [0.0, 0.0], [0.5]):  # mixed, tied, all failed, alone
        group = make_group(rewards, tool=2)
        score(algorithm, group)
        for rollout in group:
            for sample in rollout.samples:
                _check_streams(sample, rewards)
            stamp(rollout, algorithm.action_loss)


def _check_streams(sample: Sample, rewards: list[float]) -> None:
    for name in STREAMS:
        stream = getattr(sample, name)
        assert stream is None or len(stream) == len(sample), f"{name}: wrong length at {rewards}"
        assert stream is None or np.isfinite(stream).all(), f"{name}: not finite at {rewards}"
    if sample.advantages is not None:
        off_mask = sample.advantages[~sample.loss_mask]
        assert not off_mask.any(), f"advantages: credit off the mask at {rewards}"
