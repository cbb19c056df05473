"""``difficulty_pools``: examples that the policy always or never solves leave the rotation.

    mean reward of a group >= easy_threshold    the example is easy, and is not sampled again
                           <= hard_threshold    it is hard, and is not sampled again
    online_difficulty_filtering                 a group whose mean is exactly 0.0 or 1.0 does not
                                                train; its example stays

Settings and files are those of prime-rl's ``buffer``. Where we differ from it:

1. Examples of an env come in order, as ``standard`` hands them out, not at random with repeats.
2. Without thresholds and ratios every env is alike, as for ``standard``. With thresholds, and no
   env with a ratio, an env's share is its number of normal examples, as in ``buffer``; if any env
   has a ratio, envs without one count 1.
3. An env without end shows an example once: its examples are never retired. It needs a ratio where
   shares would be numbers of examples.
4. Only groups sampled from the policy count: what a teacher or a demonstration achieved says
   nothing about the policy.
5. Evictions are shares of an env's groups, filtered rollouts of its rollouts.
6. Finished rollouts are the orchestrator's to keep: ``rollout_buffer.jsonl`` holds the sampler's
   own state (``pool_files``).
"""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from prime_rl import ConfigError, Group, RunError, SampledEnv, Sampler
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
from prime_rl_samplers.rotation import POOLS, Pool, Rotation, Tally, shares_of

log = logging.getLogger(__name__)


class DifficultyPools(Sampler):
    """Samples the examples of which the policy solves some, and not all."""

    name = "difficulty_pools"
    config_class = DifficultyPoolsConfig
    config: DifficultyPoolsConfig

    def __init__(
        self, config: DifficultyPoolsConfig, envs: Sequence[SampledEnv], seed: int
    ) -> None:
        super().__init__(config, envs, seed if config.seed is None else config.seed)
        self._random = random.Random(self.seed)
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
        retired, or what is left has nothing to give."""
        indices = range(len(self.envs))
        weights = [self._weight(index) for index in indices]
        if not any(weights):
            raise self._exhausted()
        (env,) = self._random.choices(indices, weights)
        return env, self._rotations[env].next()

    def _weight(self, index: int) -> float:
        env, num_normal = self.envs[index], self._rotations[index].num_normal
        if num_normal == 0 or not env.is_ready():
            return 0.0
        if self._by_count:
            return float(num_normal or 0)
        return 1.0 if env.ratio is None else env.ratio

    def _exhausted(self) -> RunError:
        return RunError(
            "No environments left with examples: "
            + "; ".join(self._standing(env.name, r) for env, r in self._pairs())
            + ". Move the thresholds of [orchestrator.buffer] apart, lift examples back with "
            "easy_fraction or hard_fraction and load_from, or add examples."
        )

    def _standing(self, env: str, rotation: Rotation) -> str:
        if rotation.size is None or rotation.num_normal:
            return f"env {env!r} has nothing to give yet (its source is not ready)"
        easy, hard = (len(rotation.in_pool(pool)) for pool in POOLS)
        return f"env {env!r} has {easy} easy, {rotation.num_normal} normal, {hard} hard"

    # -- feedback -------------------------------------------------------------------------------

    def observe(self, group: Group) -> None:
        """Retire the group's example if the policy solved it well enough, or hardly at all."""
        if not _is_evidence(group):
            return
        rotation = self._by_name[group[0].env]
        rotation.tally.groups += 1
        rotation.tally.rollouts += len(group)
        pool = self._verdict(fmean(rollout.reward for rollout in group))
        if pool is not None and rotation.size is not None:
            was_left = rotation.num_normal
            rotation.retire(group[0].example_id, pool)
            if was_left and not rotation.num_normal:
                log.warning(
                    "%s: it is not sampled any more", self._standing(group[0].env, rotation)
                )

    def reject(self, group: Group) -> str | None:
        """Online difficulty filtering: a group that tells nothing apart, all failed or all
        solved."""
        if not self.config.online_difficulty_filtering or not _is_evidence(group):
            return None
        mean = fmean(rollout.reward for rollout in group)
        kind = {0.0: "hard", 1.0: "easy"}.get(mean)
        if kind is None:
            return None
        self._by_name[group[0].env].tally.filtered[kind] += len(group)
        return f"online difficulty filtering: too {kind}, the group's mean reward is {mean}"

    def _verdict(self, mean: float) -> Pool | None:
        easy, hard = self.config.easy_threshold, self.config.hard_threshold
        if easy is not None and mean >= easy:
            return "easy"
        return "hard" if hard is not None and mean <= hard else None

    def metrics(self) -> Mapping[str, float]:
        """``pool/...``: shares of the examples, over all envs and each, of envs with an end;
        ``evicted_examples/...`` and ``filtered_rollouts/...`` since the last call."""
        finite = [(env.name, r) for env, r in self._pairs() if r.size is not None]
        metrics = shares_of("pool", [r for _, r in finite]) if finite else {}
        for name, rotation in finite:
            metrics |= shares_of(f"pool/{name}", [rotation])
        for env, rotation in self._pairs():
            metrics |= rotation.tally.as_metrics(env.name)
            rotation.tally = Tally()
        return metrics

    # -- checkpoint -----------------------------------------------------------------------------

    def save(self, directory: Path) -> None:
        """Write the pools and where the sampler stands."""
        for pool in POOLS:
            write_rows(pool_file(directory, pool), self._rows(pool))
        version, internal, gauss = self._random.getstate()
        own = {"hash_keys": self.config.hash_keys, "random_state": [version, internal, gauss]}
        standing = [{"env_name": env.name, **r.state()} for env, r in self._pairs()]
        write_lines(directory / STATE_FILE, [own, *standing])

    def _rows(self, pool: Pool) -> list[Row]:
        keys = self.config.hash_keys
        return [row_of(env, index, keys) for env, r in self._pairs() for index in r.in_pool(pool)]

    def load(self, directory: Path) -> None:
        """Go on from what ``save`` wrote: exactly, if no fraction is set and the envs are the same.

        An env that is new starts at its first example; one that is gone is forgotten. Raises
        ``ConfigError`` naming the file if it is not what ``save`` writes.
        """
        self._load_pools(directory)
        path = directory / STATE_FILE
        own, *standing = read_lines(path)
        try:
            version, internal, gauss = own["random_state"]
            self._random.setstate((version, tuple(internal), gauss))
            for state in standing:
                if rotation := self._by_name.get(state["env_name"]):
                    rotation.restore(state)
        except (KeyError, TypeError, ValueError) as error:
            raise _foreign(path, error) from error

    def _load_pools(self, directory: Path) -> None:
        """Replace the pools by those saved, and lift back what the fractions say."""
        self._check_keys(directory / STATE_FILE)
        found, missing = find(read_pools(directory), self.envs, self.config.hash_keys)
        if missing:
            log.warning("%d pooled examples of %s are in no env of this run", missing, directory)
        for rotation in self._rotations:
            rotation.retired.clear()
        for (env, example), pool in found:
            self._rotations[env].retired[example] = pool
        for pool in POOLS:
            self._lift(pool, getattr(self.config, f"{pool}_fraction"))

    def _lift(self, pool: Pool, fraction: float) -> None:
        """Put ``round(len(pool) * fraction)`` random examples back into the rotation."""
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
                f"{path}: its examples are known by hash_keys = {saved}, and "
                f"orchestrator.buffer.hash_keys is {list(self.config.hash_keys)}: none would be "
                "found. Set the same keys."
            )

    def _pairs(self) -> list[tuple[SampledEnv, Rotation]]:
        return list(zip(self.envs, self._rotations, strict=True))


def _is_evidence(group: Group) -> bool:
    """The policy itself was at work."""
    return all(rollout.is_live for rollout in group)


def _foreign(path: Path, found: object) -> ConfigError:
    return ConfigError(
        f"{path}: expected the state that sampler difficulty_pools saves, got {found!r}"
    )
