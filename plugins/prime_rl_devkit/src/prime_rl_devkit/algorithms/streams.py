"""Checks of the streams an algorithm writes: lengths, masks, components, reference logprobs, and
groups that are small, tied, failed, extreme or broken."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterator, Sequence

import numpy as np

from prime_rl.errors import StreamError
from prime_rl.plugins.hookspecs import hookimpl
from prime_rl.registry.components import installed_losses
from prime_rl.rollout import Group, Rollout, Sample
from prime_rl.streams import components, members, stream, stream_names
from prime_rl_devkit.algorithms.subject import MIXED, Subject, different, streams
from prime_rl_devkit.verdicts import Broken, NotApplicable, raised


def streams_align(subject: Subject) -> None:
    """Every stream has one finite value per token of its sample."""
    check_streams(subject.scored(MIXED), MIXED)


def check_streams(group: Group, rewards: Sequence[float]) -> None:
    """Raise ``Broken`` for a stream of the wrong length or with a value that is not finite."""
    for where, sample in _samples(group):
        for name in stream_names(sample):
            column = np.asarray(stream(sample, name))
            place = f"{name} of {where}, rewards {list(rewards)}"
            if column.shape[:1] != (len(sample),):
                raise Broken(
                    f"{place}: wrong length: got shape {column.shape}, expected "
                    f"({len(sample)},). Write streams by rollout.assign_...(), which checks."
                )
            if not np.isfinite(column).all():
                raise Broken(f"{place}: not finite: got {column.tolist()}")


def credit_on_mask(subject: Subject) -> None:
    """Credit, and weights of losses that compare with the sampling policy, are zero on tokens that
    it did not sample."""
    for where, sample in _samples(subject.scored(MIXED)):
        losses = [n for n in components(sample) if installed_losses()[n].cls.compares_with_sampler]
        for name in ("advantages", *(f"{loss}_weights" for loss in losses)):
            column = stream(sample, name)
            if column is not None and (off := column[~sample.loss_mask]).any():
                raise Broken(
                    f"{name} of {where}: off the mask: got {int((off != 0).sum())} values that are "
                    "not 0.0 on tokens the policy did not sample. To train what the environment "
                    "said, use the hook observation_weights."
                )


def declared_component(subject: Subject) -> None:
    """Sampled tokens feed the loss component that ``action_loss`` declares."""
    declared = subject.fresh().action_loss
    fed: Counter[str] = Counter()
    for _, sample in _samples(subject.stamped(MIXED)):
        for component in components(sample):
            fed[component] += int((members(sample, component) & sample.loss_mask).sum())

    if not fed[declared]:
        others = ", ".join(c for c in fed if fed[c]) or "nothing"
        raise Broken(
            f"action_loss = {declared!r}, but no sampled token feeds {declared}; they feed "
            f"{others}. Change action_loss, or the weights that are assigned."
        )


def group_of_one(subject: Subject) -> None:
    """A lone survivor of its group is scored; it gets nothing where credit is relative to
    siblings."""
    (rollout,) = _survives(subject, (0.5,))
    if subject.cls.group_relative and rollout.advantages is not None and rollout.advantages.any():
        raise Broken(
            f"a lone rollout with reward 0.5: got credit {float(rollout.advantages[0]):.3g}, "
            "expected 0.0, because group_relative = True and it has no siblings"
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
        raise Broken(f"rewards {list(rewards)}: {raised(error)}") from error
    check_streams(group, rewards)
    return [subject.stamp(rollout) for rollout in group]


def tied_group(subject: Subject) -> None:
    """Equal rollouts get equal credit, exactly zero where credit is relative to siblings."""
    remembers = subject.remembers()
    for size in (3, 4, 7):
        group = subject.scored((0.1,) * size)
        if subject.cls.group_relative:
            _check_zero(group, size)
        elif not remembers:
            first = streams(group[:1])
            for number, rollout in enumerate(group):
                difference = different(streams([rollout]), first)
                if difference:
                    raise Broken(
                        f"rollouts 0 and {number} are equal but for their place: {difference}"
                    )


def _check_zero(group: Group, size: int) -> None:
    for _, sample in _samples(group):
        if sample.advantages is not None and sample.advantages.any():
            residue = float(np.abs(sample.advantages).max())
            raise Broken(
                f"{size} rewards of 0.1: got credit {residue:.3g}, expected exactly 0.0, because "
                "group_relative = True; the zero_advantage filter drops only exact zeros. Measure "
                "from the first reward: mean(r - r[0]) is exact where r - mean(r) is not."
            )


class _Spoil:
    """A wrapper that loses the reward after core has looked at it, and until it looks again."""

    @hookimpl(wrapper=True)
    def score_group(self, group: Group) -> Generator[None, object, object]:
        reward = group[0].reward
        group[0].reward = float("nan")
        try:
            return (yield)
        finally:
            group[0].reward = reward


def nan_reward(subject: Subject) -> None:
    """A reward that is no number ends in an error, or in finite streams; never in a stream."""
    try:
        subject.scored((float("nan"), 1.0))
    except StreamError as error:
        if "reward is nan" not in str(error):
            raise Broken(f"expected an error that names the reward, got: {error}") from error
    else:
        raise Broken("a reward of nan was scored; expected a StreamError")

    group = subject.make_group(MIXED)
    try:
        subject.score(group, _Spoil())
    except (ValueError, ArithmeticError):
        return

    check_streams(group, (float("nan"), *MIXED[1:]))


def reference_aligned(subject: Subject) -> None:
    """A reference logprob belongs to its own token, not to a neighbor's."""
    before = subject.scored(MIXED[:1])
    if all(sample.ref_logprobs is None for sample in before[0].samples):
        raise NotApplicable("assigns no ref_logprobs")
    sample = before[0].samples[0]
    place = int(np.flatnonzero(sample.loss_mask)[0])
    changed = subject.make_group(MIXED[:1])
    ids = changed[0].samples[0].token_ids.copy()
    ids[place] += 1
    changed[0].samples[0].token_ids = ids
    subject.score(changed)
    pair = [streams(group)[0]["ref_logprobs"] for group in (before, changed)]
    assert pair[0] is not None and pair[1] is not None
    moved = np.flatnonzero(pair[0] != pair[1]).tolist()
    if moved and place not in moved:
        raise Broken(
            f"another token at position {place} changed ref_logprobs at {moved}. A model's "
            "logprobs()[t] is that of token t given those before it: do not shift it."
        )


def _samples(group: Group) -> Iterator[tuple[str, Sample]]:
    for number, rollout in enumerate(group):
        for index, sample in enumerate(rollout.samples):
            yield f"rollout {number}, sample {index}", sample
