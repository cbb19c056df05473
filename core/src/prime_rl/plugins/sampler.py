"""Samplers choose examples; sources give rollouts that no model has to sample.

Orchestrator side: entry-point group ``prime_rl``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import ConfigDict, NonNegativeInt, PositiveInt

from prime_rl.config.contract import SamplingConfig
from prime_rl.plugins.base import Offer, PluginConfig

if TYPE_CHECKING:
    from prime_rl.plugins.algorithm import Host
    from prime_rl.rollout import Group, Rollout
    from prime_rl.streams import LossComponent


@dataclass(frozen=True)
class SampledEnv:
    """What a sampler may know of one training env."""

    name: str
    num_examples: int | None
    """None: the env generates examples without end."""
    ratio: float | None
    """The env's share of the batch (rollouts) as configured, that of the first step if ``weight``
    changes it; None: not configured."""
    is_ready: Callable[[], bool] = lambda: True
    """False while its source is empty (a new replay buffer), its gate is closed, or its rollouts
    all fail and a group already asks whether it works again: choose another env."""
    task: Callable[[int], Mapping[str, Any]] = lambda index: {}
    """The fields of one of its examples, ``prompt`` among them."""
    rollouts_per_group: Callable[[], float] = lambda: 1.0
    """Rollouts that a group of it brings, as last seen: those of all its trainable agents."""
    scheduled: Callable[[], float] | None = None
    """Its share of the batch that a group chosen now is for. None: ``ratio`` stays."""

    @property
    def weight(self) -> float:
        """Its share of the batch (rollouts), relative to the other envs. May change with the steps,
        and may be 0: ask for each group."""
        if self.scheduled is not None:
            return self.scheduled()
        return 1.0 if self.ratio is None else self.ratio


class Sampler(Offer):
    """Chooses which example of which env is sampled next; learns from finished groups."""

    def __init__(self, config: PluginConfig, envs: Sequence[SampledEnv], seed: int) -> None:
        super().__init__(config)
        self.envs = envs
        self.seed = seed

    def next_example(self) -> tuple[int, int]:
        """The next group's ``(env index, example index)``. Raises ``RunError`` when none is
        left."""
        raise NotImplementedError

    def observe(self, group: Group) -> None:
        """A scored group: feedback for curricula."""

    def reject(self, group: Group) -> str | None:
        """Why no member of a scored group may train, or None. Called after ``observe``, before any
        filter; rejected groups are sampled again from other examples."""
        return None

    def metrics(self) -> Mapping[str, float]:
        """Numbers since the last call, by name. Called once per step."""
        return {}

    def save(self, directory: Path) -> None:
        """Write the state that ``load`` needs. The folder exists and has no files of this
        sampler."""

    def load(self, directory: Path) -> None:
        """Restore what ``save`` wrote. Raises ``ConfigError`` if it does not fit."""


@dataclass(frozen=True)
class SourceRequest:
    """One group to take from a source."""

    group_id: int
    example_id: int
    policy_version: int
    """The policy's version now."""


class RolloutPlan(SamplingConfig):
    """How a rollout is about to be sampled. ``prepare_rollout`` may set its prompt, and what the
    trainer can reproduce: the keys of ``[orchestrator.train.sampling]``."""

    model_config = ConfigDict(frozen=False, validate_assignment=True)

    env: str = ""
    group_id: int = 0
    example_id: int = 0
    member: int = 0
    """Its number in the group, from 0."""
    group_size: PositiveInt | None = None
    """The env's, or its ``max_group_size``. A hook may lower it, alike for each member: those from
    it on are not sampled."""
    prompt: str | list[dict[str, Any]] | None = None
    """Prompt of the example: a text, or messages of the OpenAI form. None: the user of the
    environment begins."""
    past: NonNegativeInt | None = None
    """The version of the policy that plays the agents with ``model = "past"``: one of
    ``host.past_versions``. The episodes of a group are comparable if it is the same for all of
    them. None: core draws one."""


@dataclass(frozen=True, kw_only=True)
class GroupProgress:
    """What ``wanted_members`` may know of a group that is being sampled.

    It has the first members by number, as far as none of them is missing: neither the time that a
    rollout took nor its place among those that came back can decide, and a resumed run decides the
    same.
    """

    env: str
    group_id: int
    example_id: int
    rollouts: Group
    """Rollouts of the first ``ended`` members, by their numbers, without failed ones."""
    ended: int
    """Members of this prefix, those that failed included."""
    size: int
    """Members that the group has now, whether they have ended or not."""
    group_size: int
    """The env's: the size that a group begins with."""
    max_group_size: int
    """The env's: the largest size."""


class Source(Offer):
    """Gives one env rollouts that no model has to sample: demonstrations, past experience.

    Selected by ``algo.sampling.source.type``. Its rollouts never go stale, unless the live policy
    sampled them (``Host.live``).
    """

    from_policy: ClassVar[bool] = False
    """The policy wrote its rollouts: nothing to imitate."""

    feeds: ClassVar[frozenset[LossComponent]] = frozenset()
    """Losses that its rollouts may train, besides those that imitate; ``rl`` stands for all. The
    others need sampling logprobs of the policy."""

    needs_siblings: ClassVar[bool] = True
    """Its ``observe`` reads whole groups: the rollouts of every env wait for their siblings. False:
    it takes rollouts that are handed on alone as well."""

    async def setup(self, host: Host) -> None:
        """Load what it needs. Raises ``ConfigError``."""

    async def close(self) -> None:
        """Release what ``setup`` acquired."""

    @property
    def num_examples(self) -> int | None:
        """How many examples a sampler can choose from; None: the choice does not matter."""
        raise NotImplementedError

    @property
    def is_ready(self) -> bool:
        """Whether it has a group to give now."""
        return True

    def task(self, example_id: int) -> Mapping[str, Any] | None:
        """The fields of one of its own examples, ``prompt`` among them; None: the env's own example
        of that index."""
        return None

    async def group(self, request: SourceRequest) -> Sequence[Rollout]:
        """New ``Rollout`` objects of one group, without credit; the env's algorithm scores them.
        Empty if nothing is left."""
        raise NotImplementedError

    def observe(self, group: Group) -> None:
        """A scored group of any env that the sampler did not reject. Copy what you keep."""

    def settled(self, rollouts: Sequence[Rollout], reason: str | None) -> None:
        """The fate of these rollouts of ``group`` is decided; each rollout is named once.
        ``reason``: why they do not train. None: they are scored and in the buffer, which a
        checkpoint saves; a filter may still drop them."""

    def metrics(self) -> Mapping[str, float]:
        """Numbers since the last call, by name. Called once per step."""
        return {}

    def save(self, directory: Path) -> None:
        """Write the state that ``load`` needs."""

    def checkpoint_complete(self, directory: Path) -> None:
        """A checkpoint is complete, or resumed, whose ``directory`` has what ``save`` wrote: a run
        that fails goes on from it or a later one. Before, the trainer may still give it up."""

    def load(self, directory: Path) -> None:
        """Restore what ``save`` wrote."""
