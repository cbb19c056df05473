"""Checks of what an algorithm writes: lengths, masks, components."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from prime_rl.rollout import STREAMS, BoolColumn, Group, LossComponent, Sample
from prime_rl.testing.report import Broken
from prime_rl.testing.scoring import MIXED, Subject

COMPONENTS: tuple[LossComponent, ...] = ("rl", "ce", "ref_kl")


def streams_align(subject: Subject) -> None:
    """Every stream has one finite value per token of its sample."""
    check_streams(subject.scored(MIXED), MIXED)


def check_streams(group: Group, rewards: Sequence[float]) -> None:
    """Raise ``Broken`` for a stream of the wrong length or with a value that is not finite."""
    for where, sample in _samples(group):
        for name in STREAMS:
            stream = getattr(sample, name)
            if stream is None:
                continue
            place = f"{name} of {where}, rewards {list(rewards)}"
            if np.shape(stream) != (len(sample),):
                raise Broken(
                    f"{place}: wrong length: got shape {np.shape(stream)}, expected "
                    f"({len(sample)},). Write streams by rollout.assign_...(), which checks."
                )
            if not np.isfinite(stream).all():
                raise Broken(f"{place}: not finite: got {np.asarray(stream).tolist()}")


def credit_on_mask(subject: Subject) -> None:
    """Credit, and weights of rl and ref_kl, are zero on tokens the policy did not sample."""
    for where, sample in _samples(subject.scored(MIXED)):
        for name in ("advantages", "rl_weights", "ref_kl_weights"):
            stream = getattr(sample, name)
            if stream is not None and (off := stream[~sample.loss_mask]).any():
                raise Broken(
                    f"{name} of {where}: off the mask: got {int((off != 0).sum())} values that are "
                    "not 0.0 on tokens the policy did not sample. To train what the environment "
                    "said, use the hook observation_weights."
                )


def declared_component(subject: Subject) -> None:
    """Sampled tokens feed the loss component that ``action_loss`` declares."""
    declared = subject.cls.action_loss
    fed = dict.fromkeys(COMPONENTS, 0)
    for _, sample in _samples(subject.stamped(MIXED)):
        for component in COMPONENTS:
            fed[component] += int((members(sample, component) & sample.loss_mask).sum())
    if not fed[declared]:
        others = ", ".join(c for c in COMPONENTS if fed[c]) or "nothing"
        raise Broken(
            f"action_loss = {declared!r}, but no sampled token feeds {declared}; they feed "
            f"{others}. Change action_loss, or the weights that are assigned."
        )


def members(sample: Sample, component: LossComponent) -> BoolColumn:
    """[T] the tokens a component trains, as the trainer counts them."""
    weights = getattr(sample, f"{component}_weights")
    if component == "rl":
        return sample.loss_mask if weights is None else sample.loss_mask & (weights != 0)
    return np.zeros(len(sample), np.bool_) if weights is None else np.asarray(weights != 0)


def _samples(group: Group) -> Iterator[tuple[str, Sample]]:
    for number, rollout in enumerate(group):
        for index, sample in enumerate(rollout.samples):
            yield f"rollout {number}, sample {index}", sample
