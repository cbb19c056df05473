"""One engine of the fleet: what is known of it, and what it has in flight."""

from __future__ import annotations

import asyncio
import time

from prime_rl.inference.client import EngineAdmin
from prime_rl.plugins.weight_transports import Receives


class Replica:
    """Changed by ``Fleet`` only."""

    def __init__(self, number: int, admin: EngineAdmin) -> None:
        self.number, self.admin = number, admin
        self.serving = False
        """It has the current weights, and answers."""
        self.version: int | None = None
        """Of the weights it was last seen to have."""
        self.answers = False
        """At the last look."""
        self.listening = False
        """At the last look somebody took the connection."""
        self.known = False
        """It has served before."""
        self.busy = False
        """It is loading weights: what it says of its version now means nothing."""
        self.in_doubt = False
        """An update did not end well: it may be paused, or have either weights."""
        self.asleep = False
        """It has given its memory back."""
        self.locked = False
        """It did not take the run's key."""
        self.mistaken = False
        """At the last look it served another model."""
        self.hung = False
        """It takes connections and has answered nothing for long: whoever started it may end it."""
        self.hangs = 0
        """Times that it was found so."""
        self.reason = ""
        """Why it does not serve."""
        self.running = self.asked = self.retried = 0
        """Requests: in flight; ever; lost here and asked anew elsewhere."""
        self.lost: asyncio.Future[None] | None = None
        """Done when it has gone away; None before it serves."""
        self.looking = asyncio.Lock()
        self.looked_at = self.heard_at = self.join_at = 0.0
        """The last look and the last answer; no attempt to join before (``time.monotonic``)."""
        self.down_since: float | None = None
        self._proven = False
        """It has served, and its process has not been seen to go since."""
        self._silent_since: float | None = None
        self._down = 0.0
        self._taken = (0, 0)

    @property
    def url(self) -> str:
        """Without ``/v1``."""
        return self.admin.url

    @property
    def receives(self) -> Receives | None:
        """How it can receive weights, as of the last look."""
        return self.admin.receives

    @property
    def session(self) -> object:
        """Another object each time it joins."""
        return self.lost

    def rejoin(self, version: int) -> float | None:
        """It serves now; the seconds it was away, None at the start."""
        away = None if self.down_since is None else time.monotonic() - self.down_since
        self._down += away or 0.0
        self.serving, self.known, self.version = True, True, version
        self._proven = True
        self.down_since, self.reason, self.heard_at = None, "", time.monotonic()
        if self.lost is None or self.lost.done():
            self.lost = asyncio.get_running_loop().create_future()
        return away

    def leave(self) -> None:
        """It serves no more: whatever is in flight there is lost."""
        self.serving, self.down_since = False, time.monotonic()
        if self.lost is not None:
            self.lost.set_result(None)

    def heard(self) -> bool:
        """It has said something; whether that is news of one that hung."""
        news = self.hung
        self.hung, self._silent_since = False, None
        self._proven |= self.serving
        return news

    def gone(self) -> bool:
        """Nobody listens: its process has ended, and what comes after has to start up first."""
        news = self.heard()
        self._proven = self.asleep = False
        return news

    def silent(self, limit: float) -> bool:
        """Nothing was answered; for ``limit`` seconds now, and it hangs. Whether that is news."""
        now = time.monotonic()
        self._silent_since = self._silent_since or now
        # One that sleeps has nothing to answer.
        return not self.asleep and now - self._silent_since > limit and self.hang()

    def hang(self) -> bool:
        """Note that it hangs, if it has served since it started: before, it may be loading.
        Whether that is news."""
        if not self._proven:
            return False
        self.hung, self._proven = True, False
        self.hangs += 1
        return True

    def take_metrics(self) -> dict[str, float]:
        """Its state, and what was counted since the last call."""
        asked, retried = self.asked - self._taken[0], self.retried - self._taken[1]
        self._taken = self.asked, self.retried
        away = 0.0 if self.down_since is None else time.monotonic() - self.down_since
        return {
            "requests": float(asked),
            "retried": float(retried),
            "running": float(self.running),
            "serving": float(self.serving),
            "version": float(-1 if self.version is None else self.version),
            "down_seconds": self._down + away,
        }
