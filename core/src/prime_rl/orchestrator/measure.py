"""Validation loss: data that the trainer measures beside what it trains.

An env with ``measure_every`` trains nothing. All of its examples go to the trainer with the batch
of every ``measure_every``-th step and of step ``max_steps``. It reports their loss under the
weights after that step (``validation/loss``). No engine takes part.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from prime_rl.errors import ConfigError
from prime_rl.orchestrator.agents import action_loss_of
from prime_rl.orchestrator.context import RunContext, TrainEnv
from prime_rl.orchestrator.scoring import score_group, score_rollout, stamp
from prime_rl.orchestrator.sources import RolloutRequest
from prime_rl.plugins.observer import Observer
from prime_rl.rollout import Batch, Rollout

log = logging.getLogger(__name__)


class Measurement(Observer):
    """Adds the held-out rollouts to the batches that are due. They are rendered once, before the
    first step."""

    def __init__(self, run: RunContext, envs: Mapping[TrainEnv, int]) -> None:
        """``envs``: each with its number of steps between two measurements."""
        self.context = run
        self._envs = envs
        self._rollouts: dict[str, Sequence[Rollout]] = {}

    async def setup(self) -> None:
        """Raises ``ConfigError`` for an env that has no end, or nothing within ``seq_len``."""
        self._rollouts = {env.name: await self._all_of(env) for env in self._envs}

    async def batch_taken(self, batch: Batch) -> None:
        is_last = batch.step == self.context.config.max_steps
        for env, every in self._envs.items():
            if is_last or batch.step % every == 0:
                batch.measured += self._rollouts[env.name]

    async def _all_of(self, env: TrainEnv) -> list[Rollout]:
        size = env.source.num_examples
        if size is None:
            raise ConfigError(
                f"env {env.name!r}: measure_every measures all examples, and the env has no end. "
                "Give it a data set, or a number of examples."
            )

        rollouts: list[Rollout] = []
        for example in range(size):
            rollouts += await self._scored(env, example)
        if not rollouts:
            raise ConfigError(
                f"env {env.name!r}: no token of its {size} examples is among the first "
                f"{self.context.config.seq_len} (seq_len)"
            )

        log.info("env %r: %d examples are measured", env.name, size)
        return rollouts

    async def _scored(self, env: TrainEnv, example: int) -> list[Rollout]:
        request = RolloutRequest(
            group_id=example,
            example_id=example,
            # No engine takes part, so no version counts.
            policy_version=0,
            member=0,
            seed=self.context.config.seed,
        )

        group = list(await env.source.produce(request))
        for rollout in group:
            rollout.cut(self.context.config.seq_len)
        group = [rollout for rollout in group if rollout.samples]
        if not group:
            return []

        for rollout in group:
            await score_rollout(env.hooks, rollout)

        await score_group(env.hooks, group)
        for rollout in group:
            stamp(rollout, action_loss_of(env.algorithm, rollout), self.context.losses)
        return group
