"""An algorithm under test, and its streams to compare."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from prime_rl import Algorithm, Group, Host, PluginConfig, Rollout
from prime_rl.orchestrator.scoring import stamp
from prime_rl.registry.guards import Members
from prime_rl.registry.shared_state import ClassState, own_classes
from prime_rl.streams import StreamColumn, stream, stream_names
from prime_rl.testing.scoring import MakeGroup, score_async

Streams = list[dict[str, StreamColumn]]
"""The streams of every sample of a group, in order."""


@dataclass(frozen=True)
class Subject:
    """An algorithm under test and its input. Every check starts from a fresh instance."""

    cls: type[Algorithm]
    config: PluginConfig
    make_group: MakeGroup
    make_host: Callable[[], Host]
    classes: ClassState = field(init=False)
    """The attributes of its class before anything was scored."""

    def __post_init__(self) -> None:
        own_types = own_classes(self.cls(self.config))
        object.__setattr__(self, "classes", ClassState(own_types))

    def fresh(self) -> Algorithm:
        """A new instance."""
        return self.cls(self.config)

    def scored(self, rewards: Sequence[float], *plugins: object) -> list[Rollout]:
        """A new group, scored by a fresh instance, before stamping."""
        return self.score(Members(self.make_group(rewards)), *plugins)

    def score(self, group: list[Rollout], *plugins: object) -> list[Rollout]:
        """Score this group with a fresh instance."""
        self.run([group], plugins)
        return group

    def stamped(self, rewards: Sequence[float]) -> list[Rollout]:
        """A group as it leaves for the filters. Raises ``StreamError``."""
        return [self.stamp(rollout) for rollout in self.scored(rewards)]

    def stamp(self, rollout: Rollout) -> Rollout:
        """Route and freeze."""
        stamp(rollout, self.fresh().action_loss)
        return rollout

    def run(
        self, groups: Sequence[Group], plugins: Sequence[object] = (), *, at_once: bool = False
    ) -> None:
        """Score several groups with one fresh instance."""
        host = self.make_host()
        asyncio.run(score_async(self.fresh(), groups, plugins=plugins, host=host, at_once=at_once))

    def remembers(self) -> bool:
        """Whether credit depends on groups scored before: ``order_dependent``, or measured."""
        if self.cls.order_dependent:
            return True
        first = self.make_group(MIXED)
        again = self.make_group(MIXED)
        self.run([first, again])
        return bool(different(streams(first), streams(again)))


MIXED = (1.0, 0.0, 0.5)
"""Distinct rewards of a group."""


def streams(group: Group) -> Streams:
    """Copies of every stream of every sample."""
    return [
        {name: np.array(stream(sample, name)) for name in stream_names(sample)}
        for rollout in group
        for sample in rollout.samples
    ]


def different(found: Streams, expected: Streams) -> str:
    """The first stream that differs by more than rounding, and how it differs; empty if none
    differs."""
    for index, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        for name in ours | theirs:
            a = ours.get(name)
            b = theirs.get(name)
            if a is None or b is None:
                same = a is b
            else:
                same = len(a) == len(b) and np.allclose(a, b, 1e-4, 1e-6, equal_nan=True)
            if not same:
                return f"{name} of sample {index}: {_text(b)} against {_text(a)}"

    return ""


def _text(column: StreamColumn | None) -> str:
    return "none" if column is None else str(column.round(4).tolist())
