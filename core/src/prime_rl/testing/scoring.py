"""Small rollouts for tests, and scoring as the orchestrator does it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from prime_rl.orchestrator.scoring import open_for_credit, score_group, score_rollout
from prime_rl.plugins.algorithm import Algorithm, Host
from prime_rl.plugins.sampler import GroupProgress
from prime_rl.registry.calls import raise_late, watching_coroutines
from prime_rl.registry.manager import Hooks, scope
from prime_rl.rollout import LATE, ROLES, Group, Rollout, Sample
from prime_rl.testing.host import FakeHost


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


def members_wanted(
    algorithm: object, rollouts: Group, *, group_size: int, max_group_size: int
) -> int:
    """The size of a group whose first members are ``rollouts``, as a run decides it by the hook
    ``wanted_members``. More than their number: the group is not complete yet."""
    hooks = scope("test", Hooks(), own=[algorithm])
    size = group_size
    ended = 0
    while ended < min(size, len(rollouts)):
        ended += 1
        progress = GroupProgress(
            env=rollouts[0].env,
            group_id=rollouts[0].group_id,
            example_id=rollouts[0].example_id,
            rollouts=rollouts[:ended],
            ended=ended,
            size=size,
            group_size=group_size,
            max_group_size=max_group_size,
        )
        size = max(hooks.wanted_members(progress), ended)

    return size


MakeGroup = Callable[[Sequence[float]], list[Rollout]]
"""Sibling rollouts with these rewards."""


def score(algorithm: Algorithm, group: Group, *plugins: object, host: Host | None = None) -> None:
    """Run every scoring hook as the orchestrator does, wrappers of ``plugins`` included."""
    score_batch(algorithm, [group], *plugins, host=host)


def score_batch(
    algorithm: Algorithm, groups: Sequence[Group], *plugins: object, host: Host | None = None
) -> None:
    """Run every scoring hook for the groups of one batch, as ``score`` does for one group. Groups
    of several envs are what envs with this algorithm and equal settings have in a batch: here one
    object scores them all, in a run each env has its own."""
    asyncio.run(score_async(algorithm, groups, plugins=plugins, host=host or FakeHost()))


async def score_async(
    algorithm: Algorithm,
    groups: Sequence[Group],
    plugins: Sequence[object],
    host: Host,
    *,
    at_once: bool = False,
) -> None:
    """Set up, score the groups one after the other or all ``at_once``, then as a batch; close.
    Raises what a run would end with: also for credit that is written by what a hook left behind."""
    hooks = scope(host.env, Hooks(), own=[*plugins, algorithm])
    every = [rollout for group in groups for rollout in group]
    LATE.clear()  # what an earlier test has left behind
    await algorithm.setup(host)

    before = asyncio.all_tasks()
    with watching_coroutines():
        try:
            if at_once:
                with open_for_credit(every):
                    await asyncio.gather(*(score_rollout(hooks, rollout) for rollout in every))
                    await asyncio.gather(*(score_group(hooks, group) for group in groups))
            else:
                for group in groups:
                    with open_for_credit(group):
                        for rollout in group:
                            await score_rollout(hooks, rollout)
                        await score_group(hooks, group)

            by_env: dict[str, list[Group]] = {}
            for group in groups:
                by_env.setdefault(group[0].env if group else host.env, []).append(group)

            with open_for_credit(every):
                for batch in by_env.values():
                    await hooks.score_batch(batch)
                await hooks.score_envs(by_env)

            left = asyncio.all_tasks() - before
            if left:  # they may write credit, which is refused
                await asyncio.wait(left, timeout=0.5)
            raise_late()
        finally:
            for rollout in every:
                rollout.open = True  # the test's own again
                rollout.opened_by = None

    await algorithm.close()
