"""The time limits of this package, in seconds, and how often a request is tried again."""

from __future__ import annotations

from dataclasses import dataclass

CONNECT_SECONDS = 10.0
"""To open a connection. The kernel does it, however busy the engine is."""
HEALTH_SECONDS = 10.0
"""For ``GET /health``, which an engine answers whatever it does."""
READ_SECONDS = 300.0
"""For ``/pause`` and ``/resume``: the engine may finish a long step first. One that answers
``/health`` then is asked again, for ``UPDATE_SECONDS`` in all."""
UPDATE_SECONDS = 3600.0
"""For ``/update_weights``: a large model from a slow file system. An engine that also answers no
``/health`` meanwhile is found hung after ``inference.hang_timeout``, long before."""
CLEAN_UP_SECONDS = 30.0
"""For all attempts to resume an engine after a failed update: the failure waits to be reported."""
GONE_CLEAN_UP_SECONDS = 1.0
"""The same where the engine did not answer: one attempt, in case it has been paused."""

POLL_SECONDS = 1.0
"""Between two looks at an engine, and before the first repetition of a request."""
START_POLL_SECONDS = 0.1
"""Between two looks at an engine that has not served yet: the run waits for it."""
WAIT_READY_SECONDS = 0.05
"""Between two checks whether all engines have started."""
PATIENCE_SECONDS = 30.0
"""Until an engine that gives no good answer stops serving: it may be busy, or the network is at
fault, and its requests are lost then. One that is silent has ``inference.hang_timeout`` if no other
engine serves, which could take its requests. An engine that refuses connections stops at once."""
REJOIN_SECONDS = 5.0
"""Between two attempts to bring an engine up to date: each one loads weights."""
START_GRACE = 30.0
"""How long the first engine that serves waits for the others at the start. Engines of one run
start alike."""
CANCEL_SECONDS = 5.0
"""For a cancelled request to end."""

STRAGGLER_SECONDS = 30.0
"""A task that takes less is no straggler, however fast the others were."""
STRAGGLER_FACTOR = 10.0
"""Times what the slowest of the others took. They are alike and read the same files; a cold disk
or a slow network costs several times as much, not ten times."""

WAIT_FACTOR = 2.0
"""Times what it took to load a version that others have replaced: an engine waits so long for the
next one. Then it loads the current one by itself, because a step takes longer than loading."""

EPISODE_TRIES = 4
"""Times an episode is tried again at engines that are there and fail: over some 15 seconds."""
LOST_TRIES = 4
"""Engines that may go away under one request before it is given up: it may be what kills them. All
of its attempts count, however long they lasted: it may kill an engine after an hour."""


@dataclass(frozen=True)
class RetryPolicy:
    """Exponential backoff. For admin routes see semantics 2.11."""

    attempts: int = 10
    first_wait: float = 1.0
    """Seconds before the second attempt; doubled each time."""
    longest_wait: float = 10.0

    def wait_after(self, attempt: int) -> float:
        """Seconds until the next attempt. The first attempt is 1."""
        return min(self.first_wait * 2.0 ** min(attempt - 1, 32), self.longest_wait)
