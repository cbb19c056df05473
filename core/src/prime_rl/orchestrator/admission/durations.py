"""How long the groups of an env take, estimated from finished and unfinished groups."""

from __future__ import annotations

from collections import deque
from statistics import fmean

import numpy as np

from prime_rl.orchestrator.admission.tickets import Duration

WINDOW = 128
INFLIGHT_WINDOW = 4
"""The last groups of an env are remembered with their durations: at least so many, and so many
times the number in flight. What was slow only at the start of a run is soon forgotten."""


class Durations:
    """How long the groups of one env take, estimated from finished and unfinished groups."""

    def __init__(self) -> None:
        self._opened: deque[Duration] = deque()
        """Of the groups that were opened last, in this order."""
        self.num_inflight = 0

    def open(self, duration: Duration) -> None:
        self._opened.append(duration)
        self.num_inflight += 1
        while len(self._opened) > max(WINDOW, INFLIGHT_WINDOW * self.num_inflight):
            self._opened.popleft()

    @property
    def mean(self) -> float | None:
        """Mean duration of the groups that came back. None: no group has come back."""
        seconds = [each.seconds for each in self._opened if each.is_complete]
        return fmean(seconds) if seconds else None

    def survival(self, now: float) -> Survival:
        """The distribution, as far as it is known."""
        return Survival(
            ended=np.array([each.seconds for each in self._opened if each.is_complete]),
            ages=np.array([each.age(now) for each in self._opened if not each.is_complete]),
        )

    def ages(self, now: float) -> np.ndarray:
        """Seconds since each group was opened, whether it has come back or not."""
        return np.array([now - (each.opened_at or 0.0) for each in self._opened])


class Survival:
    """The share of groups that take longer than a time: the Kaplan-Meier estimate.

    A group in flight counts as one that takes longer than its age. Without it, the long groups
    would be missing until they come back. No group is expected to take longer than the longest that
    was seen.
    """

    def __init__(self, ended: np.ndarray, ages: np.ndarray) -> None:
        """``ended``: seconds of the groups that came back. ``ages``: seconds since the start of
        unfinished groups."""
        everything = np.sort(np.concatenate([ended, ages]))
        self._ended = np.sort(ended)
        self._longest = everything[-1] if len(everything) else 0.0

        # Kaplan-Meier: the product of (1 - 1 / number at risk) over the groups that ended before.
        at_risk = len(everything) - np.searchsorted(everything, self._ended, side="left")
        # Equal durations leave one after the other, so that each factor is a single departure.
        ties = np.arange(len(ended)) - np.searchsorted(self._ended, self._ended, side="left")
        self._shares = np.cumprod(np.append(1.0, 1.0 - 1.0 / (at_risk - ties)))

    @property
    def mean(self) -> float:
        """Mean seconds of a group, of those in flight as far as they are known."""
        borders = np.concatenate([[0.0], self._ended, [self._longest]])
        # The area under the estimate, which is a step function.
        return float((np.diff(borders) * self._shares).sum())

    @property
    def median(self) -> float:
        """The median duration of the groups; the longest duration so far if more than half of them
        are unfinished."""
        (below,) = np.nonzero(self._shares[1:] <= 0.5)
        return float(self._ended[below[0]] if len(below) else self._longest)

    def beyond(self, seconds: np.ndarray) -> np.ndarray:
        """The share that takes longer, for each of ``seconds``."""
        shares = self._shares[np.searchsorted(self._ended, seconds, side="right")]
        return np.where(seconds < self._longest, shares, 0.0)
