"""How many groups of an env may open per minute."""

from __future__ import annotations

from collections import deque

MINUTE = 60.0
"""Seconds in which ``tasks_per_minute`` groups may open."""
TOLERANCE = 1e-9
"""Tolerated error of the sum of shares of groups, which are floats."""


class RateLimit:
    """At most ``per_minute`` groups in any 60 seconds. The first ones open at once."""

    def __init__(self, per_minute: int) -> None:
        self._per_minute = per_minute
        self._opened: deque[tuple[float, float]] = deque()
        """When, and which share of a group: of those in the last minute."""

    def wait(self, now: float) -> float:
        """Seconds until the next group may open; 0.0: now."""
        while self._opened and now - self._opened[0][0] >= MINUTE:
            self._opened.popleft()
        used = sum(share for _, share in self._opened)
        if used < self._per_minute - TOLERANCE:
            return 0.0
        return MINUTE - (now - self._opened[0][0])

    def open(self, now: float, share: float = 1.0) -> None:
        """A group opens, or a ``share`` of one: a member that is handed on alone."""
        self._opened.append((now, share))
