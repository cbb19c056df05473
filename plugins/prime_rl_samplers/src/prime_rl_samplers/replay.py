"""``replay``: train again on finished groups of another env of the run.

    group of ``env`` finished    store a copy, without credit
    group requested              return a stored group; this env's algorithm assigns new credit

Staleness: let v be the policy version at a group's start, and V the current version. A group with
V - v > ``max_staleness`` is evicted and never returned. A returned group then waits for its batch
like any rollout, so it may train up to that wait later.

It may feed ``rl`` and ``ref_kl``: ``inference_logprobs`` stay those of the policy μ that sampled
the tokens, so the trainer's ratio π / μ is correct at any age. The limits are:

1. The ratio corrects each token given its prefix; the prefixes are still samples of μ.
2. The further π is from μ, the more tokens the loss masks or clips: a large ``max_staleness`` may
   train on fewer tokens, not on more.
3. Group-relative credit compares siblings that μ sampled.
4. The reward is the env's original one. Plugins that shape rewards shape it again, once.
"""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Literal

import msgspec
from pydantic import NonNegativeInt, PositiveInt, model_validator

from prime_rl import ConfigError, Group, Host, PluginConfig, Rollout, Source, SourceRequest
from prime_rl_samplers.shelf import Kept, keep, restore

log = logging.getLogger(__name__)

STATE_FILE = "replay.msgpack"


class ReplayConfig(PluginConfig):
    """Settings of ``replay``."""

    env: str
    """Label of the env whose groups are stored. It must sample from the policy."""
    capacity: PositiveInt = 256
    """Maximum number of stored groups; a new one replaces the oldest. A group takes 15 bytes per
    token plus its example's text, in memory and in every checkpoint."""
    min_staleness: NonNegativeInt = 2
    """Minimum age of a returned group in policy versions. With 2, the optimizer step that it first
    trained in is over, and no token occurs twice in one step."""
    max_staleness: NonNegativeInt = 8
    """Maximum age of a returned group: policy versions since the group's start."""
    max_reuse: PositiveInt = 1
    """How often one group is returned."""
    order: Literal["uniform", "newest", "oldest"] = "uniform"
    """Which stored group is returned next, by the time of storing."""
    seed: int = 0
    """Seed of the order ``uniform``."""

    @model_validator(mode="after")
    def _leaves_time(self) -> ReplayConfig:
        if self.min_staleness > self.max_staleness:
            raise ValueError(
                f"min_staleness {self.min_staleness} is more than max_staleness "
                f"{self.max_staleness}: no group could ever be returned"
            )
        return self


class ReplayState(msgspec.Struct):
    """The contents of the state file."""

    env: str
    kept: list[Kept]
    version: int
    evictions: dict[str, int]
    staleness: list[int]
    random_state: tuple[int, tuple[int, ...], float | None]


class Replay(Source):
    """Returns stored groups."""

    name = "replay"
    config_class = ReplayConfig
    config: ReplayConfig
    from_policy = True
    feeds = frozenset({"rl", "ce", "ref_kl"})

    def __init__(self, config: ReplayConfig) -> None:
        super().__init__(config)
        self._random = random.Random(config.seed)
        self._kept: list[Kept] = []
        self._version = 0
        self._evictions: Counter[str] = Counter()
        self._staleness: list[int] = []

    async def setup(self, host: Host) -> None:
        """Raises ``ConfigError`` if ``env`` is this env, or not an env of the run."""
        self._label = host.env
        if self.config.env == host.env:
            raise ConfigError(
                f"env {host.env!r}: algo.sampling.source.env: got the env itself, which does not "
                "sample; expected the label of another [[orchestrator.train.env]]"
            )

        if self.config.env not in host.envs:
            raise ConfigError(
                f"env {host.env!r}: algo.sampling.source.env: the run has no training env "
                f"{self.config.env!r}; it has {', '.join(map(repr, host.envs))}"
            )

    @property
    def num_examples(self) -> int | None:
        """None: it ignores the requested example and returns any stored group."""
        return None

    @property
    def is_ready(self) -> bool:
        """Whether a group is stored whose age is within the bounds, at the last known version."""
        return bool(self._ripe())

    # -- in and out -----------------------------------------------------------------------------

    def observe(self, group: Group) -> None:
        """Store a group of ``env``. Raises ``ConfigError`` if the policy did not sample it."""
        if group[0].env == self.config.env:
            for rollout in group:
                self._check(rollout)
            self._kept.append(keep(group))
        self._advance(max(rollout.policy_version for rollout in group))
        self._make_room()

    async def group(self, request: SourceRequest) -> Sequence[Rollout]:
        """A stored group with the request's id and this env's label. Example, task, versions and
        logprobs are the original ones. Empty if another request took the last group."""
        self._advance(request.policy_version)
        ripe = self._ripe()
        if not ripe:
            return []
        index = self._choose(ripe)
        kept = self._kept[index]
        kept.uses += 1
        if kept.uses >= self.config.max_reuse:
            del self._kept[index]
            self._evictions["max_reuse"] += 1

        self._staleness.append(request.policy_version - kept.policy_version)
        return [self._relabeled(rollout, request) for rollout in restore(kept)]

    def _ripe(self) -> list[int]:
        """Indices of the groups that may be returned."""
        newest = self._version - self.config.min_staleness
        return [i for i, kept in enumerate(self._kept) if kept.policy_version <= newest]

    def _choose(self, ripe: list[int]) -> int:
        if self.config.order == "uniform":
            return ripe[self._random.randrange(len(ripe))]
        return ripe[0 if self.config.order == "oldest" else -1]

    def _relabeled(self, rollout: Rollout, request: SourceRequest) -> Rollout:
        rollout.info["replayed"] = {"env": rollout.env, "group_id": rollout.group_id}
        rollout.env = self._label
        rollout.group_id = request.group_id
        rollout.source = self.name
        return rollout

    # -- staleness ------------------------------------------------------------------------------

    def _advance(self, version: int) -> None:
        """Evict groups that are too old at the newest known version."""
        self._version = max(self._version, version)
        oldest = self._version - self.config.max_staleness
        fresh = [kept for kept in self._kept if kept.policy_version >= oldest]
        self._evictions["stale"] += len(self._kept) - len(fresh)
        self._kept = fresh

    def _make_room(self) -> None:
        """Evict the oldest groups beyond the capacity."""
        surplus = max(0, len(self._kept) - self.config.capacity)
        del self._kept[:surplus]
        self._evictions["capacity"] += surplus

    # -- checks ---------------------------------------------------------------------------------

    def _check(self, rollout: Rollout) -> None:
        if rollout.is_live and rollout.has_logprobs:
            return
        raise ConfigError(
            f"env {self._label!r}: algo.sampling.source.env = {self.config.env!r}: expected an env "
            f"sampled from the policy, got rollouts of source {rollout.source!r}"
            f"{'' if rollout.has_logprobs else ' without logprobs'}. Replay an env whose source is "
            '"policy".'
        )

    # -- metrics and checkpoint -----------------------------------------------------------------

    def metrics(self) -> Mapping[str, float]:
        """``size`` in groups; and, since the last call, ``evictions/<reason>`` in groups and
        ``staleness/{mean,max}`` of returned groups, if any."""
        metrics = {"size": float(len(self._kept)), "drawn": float(len(self._staleness))}
        for reason in ("capacity", "stale", "max_reuse"):
            metrics[f"evictions/{reason}"] = float(self._evictions[reason])
        if self._staleness:
            metrics["staleness/mean"] = fmean(self._staleness)
            metrics["staleness/max"] = float(max(self._staleness))

        self._evictions = Counter()
        self._staleness = []
        return metrics

    def save(self, directory: Path) -> None:
        """Write the groups and the random state."""
        state = ReplayState(
            env=self.config.env,
            kept=self._kept,
            version=self._version,
            evictions=dict(self._evictions),
            staleness=self._staleness,
            random_state=self._random.getstate(),
        )
        (directory / STATE_FILE).write_bytes(msgspec.msgpack.encode(state))

    def load(self, directory: Path) -> None:
        """Restore the state of ``save``, and evict groups beyond the current bounds. Raises
        ``ConfigError`` if it is not of this env's replay."""
        path = directory / STATE_FILE
        try:
            state = msgspec.msgpack.decode(path.read_bytes(), type=ReplayState)
            self._random.setstate(state.random_state)
        except (OSError, msgspec.MsgspecError, ValueError) as error:
            raise ConfigError(
                f"env {self._label!r}: expected the state of its replay in {path}, got {error}"
            ) from error

        if state.env != self.config.env:
            raise ConfigError(
                f"env {self._label!r}: {path} contains groups of env {state.env!r}, but "
                f"algo.sampling.source.env is {self.config.env!r}. Set it back, or start a new run."
            )

        self._kept = [kept for kept in state.kept if kept.uses < self.config.max_reuse]
        self._evictions = Counter(state.evictions)
        self._staleness = state.staleness
        self._advance(state.version)
        self._make_room()
