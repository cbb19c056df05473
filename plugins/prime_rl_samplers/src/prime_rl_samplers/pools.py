"""``difficulty_pools``: retire examples that the policy always or never solves.

    mean reward of a group >= easy_threshold    the example is easy, and is not sampled again
                           <= hard_threshold    it is hard, and is not sampled again
    online_difficulty_filtering                 a group whose mean is exactly 0.0 or 1.0 does not
                                                train; its example stays

Settings and files are those of prime-rl's ``buffer``. The differences are:

1. Examples of an env come in order, as in ``standard``, not at random with repeats.
2. Without thresholds and ratios all envs have equal shares, as in ``standard``. With thresholds and
   no ratio on any env, an env's share is its number of normal examples, as in ``buffer``. If any
   env has a ratio, envs without one count 1.
3. An env with unlimited examples shows each once, so they are never retired. Such an env needs a
   ratio if shares would be numbers of examples.
4. Only groups that the policy sampled count: results of a teacher or a demonstration do not measure
   the policy.
5. Evictions are shares of an env's groups, filtered rollouts are shares of its rollouts.
6. The orchestrator keeps finished rollouts. ``rollout_buffer.jsonl`` contains the sampler's own
   state (``pool_files``).
"""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from prime_rl import (
    ConfigError,
    Group,
    RunError,
    SampledEnv,
    Sampler,
    at_least,
    settled,
)
from prime_rl_samplers.pool_files import (
    STATE_FILE,
    Row,
    find,
    pool_file,
    read_lines,
    read_pools,
    row_of,
    write_lines,
    write_rows,
)
from prime_rl_samplers.pool_settings import DifficultyPoolsConfig, check_envs
from prime_rl_samplers.rotation import POOLS, EnvTally, Pool, Rotation, shares_of
from prime_rl_samplers.turns import EnvTurns

log = logging.getLogger(__name__)


class DifficultyPools(Sampler):
    """Samples the examples that the policy solves sometimes."""

    name = "difficulty_pools"
    config_class = DifficultyPoolsConfig
    config: DifficultyPoolsConfig

    def __init__(
        self, config: DifficultyPoolsConfig, envs: Sequence[SampledEnv], seed: int
    ) -> None:
        super().__init__(config, envs, seed if config.seed is None else config.seed)
        self._random = random.Random(self.seed)
        self._turns = EnvTurns([env.name for env in envs])
        self._rotations = [Rotation(env.num_examples) for env in envs]
        self._by_name = dict(zip((env.name for env in envs), self._rotations, strict=True))
        self._by_count = config.uses_pools and all(env.ratio is None for env in envs)
        if config.uses_pools:
            check_envs(config, envs)
        if config.load_from is not None:
            self._load_pools(config.load_from)

    # -- sampling -------------------------------------------------------------------------------

    def next_example(self) -> tuple[int, int]:
        """The next group's ``(env index, example index)``. Raises ``RunError`` if every example is
        retired or every other env's source is not ready."""
        indices = range(len(self.envs))
        weights = [self._weight(index) for index in indices]
        if not any(weights):
            raise self._exhausted()
        env = self._turns.next(weights, self._random)
        return env, self._rotations[env].next()

    def _weight(self, index: int) -> float:
        env = self.envs[index]
        num_normal = self._rotations[index].num_normal
        if num_normal == 0 or not env.is_ready():
            return 0.0
        if self._by_count:
            return float(num_normal or 0)
        return env.weight / env.rollouts_per_group()

    def _exhausted(self) -> RunError:
        return RunError(
            "No environments left with examples: "
            + "; ".join(self._describe(env.name, r) for env, r in self._pairs())
            + ". Move the thresholds of [orchestrator.sampler] apart, return examples with "
            "easy_fraction or hard_fraction and load_from, or add examples."
        )

    def _describe(self, env: str, rotation: Rotation) -> str:
        if rotation.size is None or rotation.num_normal:
            why = "its source is not ready, its gate is closed or its weight is 0 now"
            return f"env {env!r} has no rollouts yet ({why})"
        easy, hard = (len(rotation.in_pool(pool)) for pool in POOLS)
        return f"env {env!r} has {easy} easy, {rotation.num_normal} normal, {hard} hard"

    # -- feedback -------------------------------------------------------------------------------

    def observe(self, group: Group) -> None:
        """Retire the group's example if its mean reward is beyond a threshold."""
        if not _from_policy(group):
            return
        rotation = self._by_name[group[0].env]
        rotation.tally.groups += 1
        rotation.tally.rollouts += len(group)
        pool = self._pool_of(mean_reward(group))
        if pool is not None and rotation.size is not None:
            was_left = rotation.num_normal
            rotation.retire(group[0].example_id, pool)
            if was_left and not rotation.num_normal:
                log.warning("%s: it is no longer sampled", self._describe(group[0].env, rotation))

    def reject(self, group: Group) -> str | None:
        """Online difficulty filtering: reject a group in which all failed or all succeeded."""
        if not self.config.online_difficulty_filtering or not _from_policy(group):
            return None
        mean = mean_reward(group)
        kind = {0.0: "hard", 1.0: "easy"}.get(mean)
        if kind is None:
            return None
        self._by_name[group[0].env].tally.filtered[kind] += len(group)
        return f"online difficulty filtering: too {kind}, the group's mean reward is {mean}"

    def _pool_of(self, mean: float) -> Pool | None:
        easy = self.config.easy_threshold
        hard = self.config.hard_threshold
        if easy is not None and at_least(mean, easy):
            return "easy"
        return "hard" if hard is not None and at_least(hard, mean) else None

    def metrics(self) -> Mapping[str, float]:
        """``pool/...``: shares of the examples, for all envs and each, without unlimited envs.
        ``evicted_examples/...`` and ``filtered_rollouts/...``: since the last call."""
        finite = [(env.name, r) for env, r in self._pairs() if r.size is not None]
        metrics = shares_of("pool", [r for _, r in finite]) if finite else {}
        for name, rotation in finite:
            metrics |= shares_of(f"pool/{name}", [rotation])
        for env, rotation in self._pairs():
            metrics |= rotation.tally.as_metrics(env.name)
            rotation.tally = EnvTally()
        return metrics

    # -- checkpoint -----------------------------------------------------------------------------

    def save(self, directory: Path) -> None:
        """Write the pools and the sampler's state."""
        for pool in POOLS:
            write_rows(pool_file(directory, pool), self._rows(pool))
        version, internal, gauss = self._random.getstate()
        shared = {
            "hash_keys": self.config.hash_keys,
            "credits": self._turns.state,
            "random_state": [version, internal, gauss],
        }
        states = [{"env_name": env.name, **r.state()} for env, r in self._pairs()]
        write_lines(directory / STATE_FILE, [shared, *states])

    def _rows(self, pool: Pool) -> list[Row]:
        keys = self.config.hash_keys
        return [row_of(env, index, keys) for env, r in self._pairs() for index in r.in_pool(pool)]

    def load(self, directory: Path) -> None:
        """Restore the state of ``save``, exactly if no fraction is set and the envs are the same.

        A new env starts at its first example; a removed env is ignored. Raises ``ConfigError`` with
        the file if it is not from ``save``.
        """
        self._load_pools(directory)
        path = directory / STATE_FILE
        own, *states = read_lines(path)
        try:
            version, internal, gauss = own["random_state"]
            self._random.setstate((version, tuple(internal), gauss))
            self._turns.restore(own.get("credits", {}))  # files of 0.1 have none
            for state in states:
                rotation = self._by_name.get(state["env_name"])
                if rotation:
                    rotation.restore(state)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise _foreign(path, error) from error

    def _load_pools(self, directory: Path) -> None:
        """Replace the pools by the saved ones, and return the configured fractions of them."""
        self._check_keys(directory / STATE_FILE)
        found, missing = find(read_pools(directory), self.envs, self.config.hash_keys)
        if missing:
            log.warning("%d pooled examples of %s are in no env of this run", missing, directory)
        for rotation in self._rotations:
            rotation.retired.clear()
        for (env, example), pool in found:
            self._rotations[env].retired[example] = pool
        for pool in POOLS:
            self._return(pool, getattr(self.config, f"{pool}_fraction"))

    def _return(self, pool: Pool, fraction: float) -> None:
        """Return ``round(len(pool) * fraction)`` random examples to the rotation."""
        pooled = [
            (rotation, each) for rotation in self._rotations for each in rotation.in_pool(pool)
        ]
        chance = random.Random(f"{self.seed} {pool}")
        for rotation, example in chance.sample(pooled, round(len(pooled) * fraction)):
            del rotation.retired[example]

    # -- checks ---------------------------------------------------------------------------------

    def _check_keys(self, path: Path) -> None:
        records = read_lines(path)
        saved: Any = records[0].get("hash_keys") if records else None
        if not isinstance(saved, list):
            raise _foreign(path, "no hash_keys in its first line")
        if tuple(saved) != self.config.hash_keys:
            raise ConfigError(
                f"{path}: its examples are identified by hash_keys = {saved}, but "
                f"orchestrator.sampler.hash_keys is {list(self.config.hash_keys)}, which would "
                "find none of them. Set the same keys."
            )

    def _pairs(self) -> list[tuple[SampledEnv, Rotation]]:
        return list(zip(self.envs, self._rotations, strict=True))


def mean_reward(group: Group) -> float:
    """Without its rounding."""
    rewards = [rollout.reward for rollout in group]
    return settled(fmean(rewards), scale=max(map(abs, rewards)))


def _from_policy(group: Group) -> bool:
    return all(rollout.is_live for rollout in group)


def _foreign(path: Path, found: object) -> ConfigError:
    return ConfigError(
        f"{path}: expected the state that sampler difficulty_pools saves, got {found!r}"
    )
