"""Which env is next: at random, and in the configured shares over every stretch of groups."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

MOST_CREDIT = 1e6
"""The most credit that a file may state; a run limits it to the number of its envs."""


class EnvTurns:
    """Chooses envs by weights that may change.

    Each env that takes part gets its share of a group as credit, and the chosen one pays a whole
    group. An env is drawn with a probability proportional to its credit, and never without. So
    credit stays between -1 and n - 1 for n envs, and any stretch of groups has their shares to
    within n groups. Independent draws would be off by a standard deviation of four groups among 80
    (shares of 3 : 1).
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._credits = [0.0] * len(names)

    def next(self, weights: Sequence[float], chance: random.Random) -> int:
        """The index of an env. ``weights``: not all 0; an env with 0 takes no part."""
        total = sum(weights)
        for index, weight in enumerate(weights):
            self._credits[index] += weight / total

        # Envs that take no part now keep their credit, which may be all that there is.
        due = [
            max(credit, 0.0) if weight else 0.0
            for credit, weight in zip(self._credits, weights, strict=True)
        ]
        (env,) = chance.choices(range(len(weights)), due if any(due) else weights)
        self._credits[env] -= 1.0
        return env

    @property
    def state(self) -> dict[str, float]:
        """The credit of each env."""
        return dict(zip(self._names, self._credits, strict=True))

    def restore(self, state: Mapping[str, float]) -> None:
        """Continue from a ``state``. A new env starts without credit. Raises ``ValueError`` for
        credit that no run has."""
        credits = [float(state.get(name, 0.0)) for name in self._names]
        for name, credit in zip(self._names, credits, strict=True):
            if not abs(credit) <= MOST_CREDIT:
                raise ValueError(f"credit of env {name!r}: found {credit}, expected a few groups")
        self._credits = credits
