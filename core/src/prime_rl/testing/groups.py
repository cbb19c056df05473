"""Checks at the edges: groups that are small, tied, failed, extreme or broken."""

from __future__ import annotations

from collections.abc import Generator

import numpy as np

from prime_rl.errors import StreamError
from prime_rl.plugins.hookspecs import hookimpl
from prime_rl.rollout import Group, Rollout
from prime_rl.testing.report import Broken
from prime_rl.testing.scoring import MIXED, Subject, different, streams
from prime_rl.testing.shape import check_streams


def group_of_one(subject: Subject) -> None:
    """A lone survivor of its group is scored; it gets nothing where credit is relative to
    siblings."""
    (rollout,) = _survives(subject, (0.5,))
    if subject.cls.group_relative and rollout.advantages is not None and rollout.advantages.any():
        raise Broken(
            f"a lone rollout with reward 0.5: got credit {float(rollout.advantages[0]):.3g}, "
            "expected 0.0, because group_relative = True: there is nobody to compare it with"
        )


def failed_group(subject: Subject) -> None:
    """A group in which every reward is zero is scored like any other."""
    _survives(subject, (0.0, 0.0, 0.0))


def extreme_rewards(subject: Subject) -> None:
    """Huge, tiny and negative rewards give finite streams."""
    for rewards in ((1e30, 0.0, 5e29), (2e-30, 0.0, 1e-30), (-1.0, -3.0, -2.0)):
        _survives(subject, rewards)


def _survives(subject: Subject, rewards: tuple[float, ...]) -> list[Rollout]:
    try:
        group = subject.scored(rewards)
    except Exception as error:
        raise Broken(f"rewards {list(rewards)}: {type(error).__name__}: {error}") from error
    check_streams(group, rewards)
    return [subject.stamp(rollout) for rollout in group]


def tied_group(subject: Subject) -> None:
    """Equal rollouts get equal credit, exactly zero where credit is relative to siblings."""
    remembers = subject.remembers()
    for size in (3, 4, 7):
        rewards = (0.1,) * size
        group = subject.scored(rewards)
        if subject.cls.group_relative:
            _check_zero(group, size)
        elif not remembers:
            _check_equal(group)


def _check_zero(group: Group, size: int) -> None:
    for sample in (sample for rollout in group for sample in rollout.samples):
        if sample.advantages is not None and sample.advantages.any():
            residue = float(np.abs(sample.advantages).max())
            raise Broken(
                f"{size} rewards of 0.1: got credit {residue:.3g}, expected exactly 0.0, because "
                "group_relative = True; the zero_advantage filter drops only exact zeros. Measure "
                "from the first reward: mean(r - r[0]) is exact where r - mean(r) is not."
            )


def _check_equal(group: Group) -> None:
    first = streams(group[:1])
    for number, rollout in enumerate(group):
        if found := different(streams([rollout]), first):
            raise Broken(f"rollouts 0 and {number} are equal but for their place: {found}")


class _Spoil:
    """A wrapper that loses the reward after core has looked at it."""

    @hookimpl(wrapper=True)
    def score_group(self, group: Group) -> Generator[None, object, object]:
        group[0].reward = float("nan")
        return (yield)


def nan_reward(subject: Subject) -> None:
    """A reward that is no number ends in an error, or in finite streams; never in a stream."""
    try:
        subject.scored((float("nan"), 1.0))
    except StreamError as error:
        if "reward is nan" not in str(error):
            raise Broken(f"expected an error that names the reward, got: {error}") from error
    else:
        raise Broken("a reward of nan was scored; expected a StreamError")
    group = subject.group(MIXED)
    try:
        subject.score(group, _Spoil())
    except (ValueError, ArithmeticError):
        return
    check_streams(group, (float("nan"), *MIXED[1:]))
