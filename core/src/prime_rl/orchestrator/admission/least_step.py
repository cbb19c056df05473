"""The shortest steps that the durations of groups allow, whatever the lead."""

from __future__ import annotations

import numpy as np

VERSIONS = 32
"""Whose groups are looked at: those that were opened last and have ended."""


class LeastStep:
    """What steps would take if everything were requested as early as ``max_off_policy_steps`` = S
    allows.

    A group of version v trains in batch v + S + 1 at the latest. With M(v), the longest of them,

        version n is served at  t(n) = max(t(n - 1), t(n - S - 1) + M(n - S - 1)) + training

    These times do not depend on the lead. Measured steps do: a short lead makes them longer, and
    would look long enough for it.
    """

    def __init__(self, max_off_policy_steps: int) -> None:
        self._max_off_policy_steps = max_off_policy_steps
        self._longest: dict[int, float] = {}
        """Seconds of the longest group, by the version that it was opened with."""
        self._computed_for: tuple[float, int] | None = None
        """The arguments of the last call of ``intervals``."""
        self._intervals = np.zeros((0, 0))

    def ended(self, version: int, seconds: float) -> None:
        """A group of ``version`` took so long."""
        self._longest[version] = max(self._longest.get(version, 0.0), seconds)

    def intervals(self, training: float, version: int) -> np.ndarray:
        """Seconds of j steps, [j - 1, n] for j from 1 to S and each first step n. ``training``:
        seconds of the trainer per step. ``version``: the one that is served."""
        if self._computed_for == (training, version):
            return self._intervals

        self._computed_for = (training, version)

        # Groups of younger versions may be in flight: the longest of them are not known yet.
        ended = version - self._max_off_policy_steps
        for old in [each for each in self._longest if each < ended - VERSIONS]:
            del self._longest[old]
        longest = [self._longest[each] for each in sorted(self._longest) if each < ended] or [0.0]

        # Twice in a row: the first round starts with nothing in flight.
        # The recursion for t(n) above.
        served = [0.0]
        for number in range(1, 2 * len(longest) + self._max_off_policy_steps + 1):
            first = number - 1 - self._max_off_policy_steps
            due = served[first] + longest[first % len(longest)] if first >= 0 else 0.0
            served.append(max(served[-1], due) + training)

        times = np.array(served)
        starts = np.arange(len(longest), 2 * len(longest))
        self._intervals = np.stack(
            [
                times[starts + steps] - times[starts]
                for steps in range(1, self._max_off_policy_steps + 1)
            ]
        )
        return self._intervals
