"""Checks of how an algorithm behaves: order, purity, determinism, concurrency."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from prime_rl.orchestrator.records import decode_rollouts, encode_rollouts
from prime_rl.plugins.algorithm import Algorithm
from prime_rl.plugins.base import PluginConfig
from prime_rl.plugins.hookspecs import hookimpl
from prime_rl.registry.checks import marked_hooks
from prime_rl.registry.guards import Members
from prime_rl.registry.manager import Hooks, scope
from prime_rl.rollout import COLUMNS, Group, Rollout
from prime_rl.streams import STREAMS
from prime_rl.testing.host import FakeHost
from prime_rl.testing.scoring import conformance_group, members_wanted, score_async
from prime_rl_devkit.algorithms.subject import MIXED, Streams, Subject, different, streams
from prime_rl_devkit.plans import check_plans
from prime_rl_devkit.verdicts import Broken, NotApplicable

FOUR = (1.0, 0.0, 0.5, 0.25)
OTHER = (0.0, 3.0, 1.0)
INPUTS = tuple(name for name in COLUMNS if name not in STREAMS)
"""Columns an algorithm may read and not write."""
FACTS = ("env", "example_id", "group_id", "reward", "rewards", "policy_version", "agent", "task")
"""Fields of a rollout that an algorithm may read and not write. It may add to ``info`` and
``metrics``."""


def permutation(subject: Subject) -> None:
    """Permuting a group permutes its credit: no rollout is favored for its place."""
    if subject.remembers():
        raise NotApplicable(
            "credit depends on what was scored before, so order matters; if that is not meant, "
            "look for state that outlives a group"
        )

    order = [2, 0, 3, 1]
    straight = subject.scored(FOUR)
    turned = subject.scored([FOUR[i] for i in order])
    expected = streams([straight[i] for i in order])
    difference = different(streams(turned), expected)
    if difference:
        raise Broken(f"rewards {list(FOUR)} in the order {order}: {difference}")


def inputs_kept(subject: Subject) -> None:
    """Scoring leaves tokens, masks, sampling logprobs, rewards and the group's order alone. It may
    append samples."""
    group = Members(subject.make_group(FOUR))
    members = list(group)
    before = [_inputs(rollout) for rollout in group]
    subject.score(group)
    if [id(each) for each in group] != [id(each) for each in members]:
        raise Broken("the group's own list was reordered or changed. Sort a copy: sorted(group)")
    for number, (rollout, old) in enumerate(zip(group, before, strict=True)):
        inputs = _inputs(rollout)
        for name in old:
            value = inputs.get(name)
            if value != old[name]:
                raise Broken(
                    f"rollout {number}: {name} was changed from {old[name]} to {value}. Work "
                    "on a copy; write credit by rollout.assign_...()."
                )


def _inputs(rollout: Rollout) -> dict[str, Any]:
    facts = {name: _plain(getattr(rollout, name)) for name in FACTS}
    for index, sample in enumerate(rollout.samples):
        facts |= {f"sample {index} {n}": _plain(getattr(sample, n)) for n in INPUTS}
    return facts


def _plain(value: Any) -> Any:
    """A copy in plain Python values; tuples are lists, as on disk."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value


def deterministic(subject: Subject) -> None:
    """The same settings and the same group give the same credit, bit for bit."""
    first = streams(subject.scored(FOUR))
    again = streams(subject.scored(FOUR))
    for one, two in zip(first, again, strict=True):
        for name in one | two:
            a = _plain(one.get(name))
            b = _plain(two.get(name))
            if a != b:
                raise Broken(
                    f"{name}: two fresh instances gave {a} and {b}. Seed what is random; keep "
                    "state on self, not on the class or the module."
                )


def concurrent_groups(subject: Subject) -> None:
    """Two groups get the same credit, scored at the same time or one after the other."""
    scored = _scored_two(subject, at_once=True)
    in_turn = (_scored_two(subject), _scored_two(subject, turned=True))
    differences = [different(scored, expected) for expected in in_turn]
    if all(differences):
        raise Broken(
            f"two groups mixed: {differences[0]}. State of one group must not wait on self while "
            "another is scored: keep it in local variables."
        )


def _scored_two(subject: Subject, *, at_once: bool = False, turned: bool = False) -> Streams:
    """The streams of two groups, always in the same order, whichever was scored first."""
    one = subject.make_group(FOUR)
    two = subject.make_group(OTHER)
    for rollout in two:
        rollout.group_id += 1
    subject.run([two, one] if turned else [one, two], at_once=at_once)
    return streams([*one, *two])


class OtherAlgorithm(Algorithm):
    """Another env's algorithm: the reward is the credit."""

    name = "foreign"

    @hookimpl
    async def score_group(self, group: Group) -> None:
        await asyncio.sleep(0)
        for rollout in group:
            rollout.assign_advantages(rollout.reward)


def neighbors(subject: Subject) -> None:
    """Credit is the same when other envs run another algorithm, and this one, at the same time; no
    attribute of its class changes."""
    alone = streams(subject.scored(FOUR))
    ours = Members(subject.make_group(FOUR))
    twin = subject.make_group(OTHER)
    foreign = conformance_group(OTHER)
    algorithms = (subject.fresh(), OtherAlgorithm(PluginConfig()), subject.fresh())

    async def env(algorithm: Algorithm, group: list[Rollout]) -> None:
        host = FakeHost() if isinstance(algorithm, OtherAlgorithm) else subject.make_host()
        await score_async(algorithm, [group], plugins=(), host=host)

    async def beside() -> None:
        pairs = zip(algorithms, (twin, foreign, ours), strict=True)
        await asyncio.gather(*(env(*pair) for pair in pairs))

    asyncio.run(beside())
    expected = [[rollout.reward] * rollout.num_trainable_tokens for rollout in foreign]
    if [_plain(rollout.advantages) for rollout in foreign] != expected:
        raise Broken(
            "another env's credit changed beside this algorithm. Write to your own group only."
        )

    difference = different(streams(ours), alone)
    if difference:
        raise Broken(
            f"beside other envs: {difference}. Keep state on self, not on the class or the module: "
            "each env has an instance of its own."
        )

    changed = subject.classes.changed()
    if changed is not None:
        raise Broken(
            f"{changed} has changed: it is one object for all envs that run the algorithm. Keep it "
            "on self: assign it in __init__."
        )


def prepares(subject: Subject) -> None:
    """``prepare_rollout`` leaves a plan that a run can sample, and the example as it was."""
    if "prepare_rollout" not in marked_hooks(subject.cls):
        raise NotApplicable("has no prepare_rollout")

    async def prepare() -> None:
        algorithm = subject.fresh()
        host = subject.make_host()
        await algorithm.setup(host)
        hooks = scope(host.env, Hooks(), [algorithm])
        await check_plans(hooks, algorithm.needs_temperature, every_form=False)
        await algorithm.close()

    asyncio.run(prepare())


GROUP_SIZE = 2
MAX_GROUP_SIZE = 6


def sizes(subject: Subject) -> None:
    """``wanted_members`` gives a number of members that a run can sample, and the same one when it
    is asked again."""
    if "wanted_members" not in marked_hooks(subject.cls):
        raise NotApplicable("has no wanted_members")

    for rewards in itertools.product((0.0, 1.0), repeat=MAX_GROUP_SIZE):
        group = subject.make_group(rewards)
        first, again = (
            members_wanted(
                subject.fresh(), group, group_size=GROUP_SIZE, max_group_size=MAX_GROUP_SIZE
            )
            for _ in range(2)
        )
        if [rollout.reward for rollout in group] != [*rewards]:
            raise Broken("it changed the reward of a rollout. Decide, and change nothing.")
        if first != again:
            raise Broken(
                f"rewards {[*rewards]}: it wants {first} members, and {again} when it is asked "
                "again. Decide by progress alone: a resumed run asks again."
            )


def round_trip(subject: Subject) -> None:
    """Scored rollouts come back from disk as they were."""
    group = subject.stamped(MIXED)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "rollouts.msgpack"
        path.write_bytes(encode_rollouts(0, ((rollout, None) for rollout in group)))
        back = [stored.rollout for stored in decode_rollouts(path)["rollouts"]]

    for number, (rollout, copy) in enumerate(zip(group, back, strict=True)):
        for name in ("reward", "rewards", "metrics", "info"):
            ours = _plain(getattr(rollout, name))
            theirs = getattr(copy, name)
            if ours != theirs:
                raise Broken(
                    f"rollout {number}: {name} is {ours} and came back as {theirs}. Put numbers, "
                    "text, lists and tables in it."
                )

    difference = different(streams(back), streams(group))
    if difference:
        raise Broken(f"came back from disk: {difference}")
