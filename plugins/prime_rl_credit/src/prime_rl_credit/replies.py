"""The replies of a rollout, and credit that is one number for each of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from prime_rl import Rollout, is_negligible
from prime_rl_grpo import centered

EPSILON = 1e-6
"""Added to a standard deviation."""


@dataclass(frozen=True)
class Reply:
    """One message that the policy sampled."""

    sample: int
    start: int
    end: int
    """Tokens ``start`` to ``end``, exclusive, of ``samples[sample]``."""
    reward: float | None
    """The reward of this reply alone. None: the env gave none."""
    observed: tuple[int, ...]
    """The tokens of the env between the reply before it and this one."""


def replies_of(rollout: Rollout) -> list[Reply]:
    """In order of time; without replies whose tokens do not train."""
    replies: list[Reply] = []
    observed: list[int] = []
    for turn in rollout.turns:
        sample = rollout.samples[turn.sample]
        if sample.loss_mask[turn.start : turn.end].any():
            reply = Reply(
                turn.sample, turn.start, end=turn.end, reward=turn.reward, observed=tuple(observed)
            )
            replies.append(reply)
            observed = []
        else:
            observed += sample.token_ids[turn.start : turn.end].tolist()

    return replies


def assign(rollout: Rollout, replies: Sequence[Reply], credit: Sequence[float]) -> None:
    """Give each trainable token the credit of its reply."""
    columns = [np.zeros(len(sample)) for sample in rollout.samples]
    for reply, value in zip(replies, credit, strict=True):
        columns[reply.sample][reply.start : reply.end] = value
    masked = [c * s.loss_mask for c, s in zip(columns, rollout.samples, strict=True)]
    rollout.assign_advantages(np.concatenate(masked))


def relative(values: Sequence[float], by_std: bool) -> list[float]:
    """``values`` minus their mean, over their standard deviation (of a population, plus 1e-6) with
    ``by_std``. Exactly 0 for ties; with ``by_std`` also for values that differ by rounding."""
    above = centered(values) if values else []
    if not by_std or not above:
        return above
    deviation = float(np.sqrt(np.mean(np.square(above))))
    if is_negligible(deviation, values):
        return [0.0] * len(above)
    return [value / (deviation + EPSILON) for value in above]
