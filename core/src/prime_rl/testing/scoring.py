"""Score groups as the orchestrator does, and compare the streams."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from prime_rl.orchestrator.scoring import score_group, score_rollout, stamp
from prime_rl.plugins.algorithm import Algorithm, Host
from prime_rl.plugins.base import PluginConfig
from prime_rl.plugins.manager import Hooks, scope
from prime_rl.rollout import Group, Rollout
from prime_rl.streams import StreamColumn, stream, stream_names
from prime_rl.testing.host import FakeHost

MakeGroup = Callable[[Sequence[float]], list[Rollout]]
"""Sibling rollouts with these rewards."""

Streams = list[dict[str, StreamColumn]]
"""The streams of every sample of a group, in order."""


def score(algorithm: Algorithm, group: Group, *plugins: object, host: Host | None = None) -> None:
    """Run every scoring hook as the orchestrator does, wrappers of ``plugins`` included."""
    score_batch(algorithm, [group], *plugins, host=host)


def score_batch(
    algorithm: Algorithm, groups: Sequence[Group], *plugins: object, host: Host | None = None
) -> None:
    """Run every scoring hook for the groups of one batch, as ``score`` does for one group."""
    asyncio.run(score_async(algorithm, groups, plugins, host or FakeHost()))


async def score_async(
    algorithm: Algorithm,
    groups: Sequence[Group],
    plugins: Sequence[object],
    host: Host,
    *,
    at_once: bool = False,
) -> None:
    """Set up, score the groups one after the other or all ``at_once``, then as a batch; close."""
    hooks = scope(host.env, Hooks(), own=[*plugins, algorithm])
    await algorithm.setup(host)
    if at_once:
        every = (rollout for group in groups for rollout in group)
        await asyncio.gather(*(score_rollout(hooks, rollout) for rollout in every))
        await asyncio.gather(*(score_group(hooks, group) for group in groups))
    else:
        for group in groups:
            for rollout in group:
                await score_rollout(hooks, rollout)
            await score_group(hooks, group)
    await hooks.score_batch(list(groups))
    await algorithm.close()


@dataclass(frozen=True)
class Subject:
    """An algorithm under test and its input. Every check starts from a fresh instance."""

    cls: type[Algorithm]
    config: PluginConfig
    make_group: MakeGroup
    make_host: Callable[[], Host]

    def fresh(self) -> Algorithm:
        """A new instance."""
        return self.cls(self.config)

    def scored(self, rewards: Sequence[float], *plugins: object) -> list[Rollout]:
        """A new group, scored by a fresh instance, before stamping."""
        return self.score(self.make_group(rewards), *plugins)

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
        asyncio.run(score_async(self.fresh(), groups, plugins, host, at_once=at_once))

    def remembers(self) -> bool:
        """Whether credit depends on groups scored before: ``order_dependent``, or measured."""
        if self.cls.order_dependent:
            return True
        first, again = self.make_group(MIXED), self.make_group(MIXED)
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
    """The first stream that differs by more than rounding, and how; empty if none does."""
    for index, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        for name in ours | theirs:
            a, b = ours.get(name), theirs.get(name)
            if a is None or b is None:
                same = a is b
            else:
                same = len(a) == len(b) and np.allclose(a, b, 1e-4, 1e-6, equal_nan=True)
            if not same:
                return f"{name} of sample {index}: {_text(b)} against {_text(a)}"
    return ""


def _text(column: StreamColumn | None) -> str:
    return "none" if column is None else str(column.round(4).tolist())
