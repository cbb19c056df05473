"""Checks of algorithms: credit that needs siblings, and credit that depends on earlier
rollouts."""

from __future__ import annotations

import asyncio
from pathlib import Path
from tempfile import TemporaryDirectory

from prime_rl.plugins.algorithm import Algorithm
from prime_rl.rollout import Group
from prime_rl.testing.scoring import score_async
from prime_rl_devkit.algorithms.subject import MIXED, Subject, different, streams
from prime_rl_devkit.verdicts import Broken, NotApplicable


def group_relative(subject: Subject) -> None:
    """Credit that only siblings give is declared: ``group_relative``."""
    if any("group_relative" in vars(cls) for cls in subject.cls.__mro__ if cls is not Algorithm):
        return
    lone = [subject.make_group((reward,)) for reward in MIXED]
    for number, group in enumerate(lone):
        group[0].group_id = number
    subject.run(lone)
    if not _any_credit([r for group in lone for r in group]) and _any_credit(subject.scored(MIXED)):
        raise Broken(
            f"groups of one with the rewards {list(MIXED)} get no credit, and one group of these "
            "rewards does. Declare group_relative = True, so that group_size = 1 is refused; or "
            "False, if a group of one can have siblings, such as several agents of an episode."
        )


def siblings(subject: Subject) -> None:
    """What needs no siblings scores a rollout alone as it does beside them."""
    if subject.fresh().compares_siblings:
        raise NotApplicable("a group is scored together")
    together = subject.scored(MIXED)
    lone = [[rollout] for rollout in subject.make_group(MIXED)]
    subject.run(lone)
    difference = different(streams([each for (each,) in lone]), streams(together))
    if difference:
        raise Broken(
            f"scored alone instead of with its siblings: {difference}. Without a score_group, or "
            "with needs_siblings = False, each rollout is scored as soon as it ends. Set "
            "needs_siblings = True."
        )


def _any_credit(group: Group) -> bool:
    return any(rollout.advantages is not None and rollout.advantages.any() for rollout in group)


def state_resumes(subject: Subject) -> None:
    """``save`` and ``load`` restore what credit depends on: a resumed run goes on as if never
    stopped."""
    saves = subject.cls.save is not Algorithm.save
    if not saves and not subject.remembers():
        raise NotApplicable("credit does not depend on earlier rollouts, and save writes nothing")
    if not saves and not subject.cls.order_dependent:
        raise NotApplicable(
            "credit depends on what was scored before, and save writes nothing. If that is state "
            "and not chance, implement save and load"
        )

    if not saves:
        raise Broken(
            "credit depends on what was scored before, and save writes nothing: a resumed run "
            "starts anew. Implement save and load."
        )

    stopped = subject.fresh()
    resumed = subject.fresh()
    _score(subject, stopped, subject.make_group(MIXED))
    with TemporaryDirectory() as folder:
        stopped.save(Path(folder))
        resumed.load(Path(folder))

    expected = subject.make_group(MIXED[::-1])
    group = subject.make_group(MIXED[::-1])
    _score(subject, stopped, expected)
    _score(subject, resumed, group)
    difference = different(streams(group), streams(expected))
    if difference:
        raise Broken(f"after save and load: {difference}. Save everything that credit depends on.")


def _score(subject: Subject, algorithm: Algorithm, group: Group) -> None:
    asyncio.run(score_async(algorithm, [group], plugins=(), host=subject.make_host()))
