"""The messages of a rollout as spans of its samples' tokens."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from prime_rl.rollout import Rollout

ROLES = ("system", "user", "assistant", "tool")
"""Message roles; a token's role is its index here, -1 if unknown."""

TURN_REWARDS = "turn_rewards"
"""Key of ``Rollout.info``: ``{str(node id): reward}`` of the turns to which the env gave one."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One message of a rollout: tokens ``start`` to ``end``, exclusive, of ``samples[sample]``."""

    sample: int
    start: int
    end: int
    role: str | None
    reward: float | None
    """Of this turn alone. None: the env gave none."""


def turns_of(rollout: Rollout) -> list[Turn]:
    """The messages in order of time, each once."""
    found: list[tuple[int, Turn]] = []
    for index, sample in enumerate(rollout.samples):
        ids, repeats, roles = sample.node_ids, sample.is_repeat, sample.roles
        parts = next(each for each in (ids, roles, sample.loss_mask) if each is not None)
        cuts = [0, *(np.flatnonzero(parts[1:] != parts[:-1]) + 1).tolist(), len(sample)]
        for start, end in pairwise(cuts):
            if repeats is None or not repeats[start]:
                node = len(found) if ids is None else int(ids[start])
                role = ROLES[roles[start]] if roles is not None and roles[start] >= 0 else None
                reward = rollout.info.get(TURN_REWARDS, {}).get(str(node))
                found.append((node, Turn(index, start, end, role, reward)))
    return [turn for _, turn in sorted(found, key=lambda each: each[0])]
