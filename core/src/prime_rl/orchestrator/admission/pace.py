"""How the seconds of a step were spent, as the trainer sees it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import inf
from statistics import fmean, median_low

CAUSES = "training", "held", "starved"
"""How the seconds of a step are spent."""

STEPS = 10
"""Steps whose seconds are remembered."""

REMEMBERED = 64
"""Steps whose starved seconds may still turn out to cost nothing."""

STARVED = 0.04
"""Share of the seconds for which the trainer may be starved without a reason to request more."""

ROOM = 0.45
"""Rollouts in flight while the trainer is starved, as a share of the most in flight. Up to here,
only a few long rollouts are left."""


@dataclass(frozen=True)
class Wait:
    """What the trainer waits for, or that it trains."""

    cause: str
    """One of ``CAUSES``."""
    env: str | None = None
    """The env of the groups that are waited for. None: any env."""
    version: int = 0
    """If it is held: a group of this version is waited for."""


@dataclass(kw_only=True)
class Load:
    """How busy the engines were, in all and while the trainer had no batch."""

    seconds: float = 0.0
    starved: float = 0.0
    held: float = 0.0
    inflight: float = 0.0
    """Rollouts in flight, times seconds."""
    inflight_starved: float = 0.0
    """The same while the trainer was starved."""
    most: float = 0.0
    limit: float = inf
    """Limit of rollouts in flight, set by the config or the engines."""

    def add(self, cause: str, seconds: float) -> None:
        self.seconds += seconds
        if cause == "starved":
            self.starved += seconds
        elif cause == "held":
            self.held += seconds

    @property
    def mean_inflight(self) -> float:
        return self.inflight / self.seconds if self.seconds else 0.0

    @property
    def is_starved(self) -> bool:
        return self.starved > STARVED * self.seconds

    @property
    def has_room(self) -> bool:
        """Whether only a few rollouts were left while the trainer was starved."""
        return self.starved > 0.0 and self.inflight_starved <= ROOM * self.most * self.starved

    @property
    def is_limited(self) -> bool:
        """Whether the limit of rollouts in flight was reached: no more than that can queue."""
        return self.most >= self.limit


class Pace:
    """Follows the trainer: when it gets a batch, and when it has made a version."""

    def __init__(self) -> None:
        self._training: deque[float] = deque(maxlen=STEPS)
        self._cycles: deque[float] = deque(maxlen=STEPS)
        self._version: int | None = None
        self._served_at = 0.0
        self._looked_at = 0.0
        self._sent_at: dict[int, float] = {}
        self._wait = Wait("training")
        self._starved: dict[str | None, float] = {}
        """Seconds since the version was served, by env; None: of any."""
        self._not_made_up: dict[int, float] = {}
        """Seconds for which the trainer was starved before a version was made."""
        self._made_up = 0.0
        self._inflight = 0
        self._counted_at = 0.0
        self.last_starved: dict[str | None, float] = {}
        """Seconds of the last step for which the trainer was starved, by the env that it waited
        for; None: of any."""
        self.last_made_up = 0.0
        """Seconds of earlier steps for which it was starved, and which turned out to cost nothing:
        in the last step, it was held for a group that was in flight all the while."""
        self.load = Load()
        self.spent: dict[str, float] = dict.fromkeys(CAUSES, 0.0)
        """Seconds by cause: ``training``; the trainer had no batch because it was ``held`` for a
        group that is late, or ``starved`` because too few groups were complete."""
        self.held: dict[str, float] = {}
        """Seconds ``held``, by the env of the group that was waited for."""

    def batch_sent(self, step: int, now: float) -> None:
        self._sent_at[step] = now

    def version_served(self, version: int, now: float) -> None:
        """The trainer has made ``version`` out of the batch of that number."""
        if self._version is not None and version > self._version:
            # Engines may skip versions, so the elapsed time is divided by the number of steps.
            steps = version - self._version
            # The trainer began when the version before was there, and the batch too.
            began = max(self._served_at, self._sent_at.get(version, self._served_at))
            self._training.append(max(now - began, 0.0) / steps)
            self._cycles.append((now - self._served_at) / steps)
            self.last_starved = {env: each / steps for env, each in self._starved.items()}
            self.last_made_up = self._made_up / steps

            self._not_made_up[version] = self.last_starved.get(None, 0.0)
            if len(self._not_made_up) > REMEMBERED:
                del self._not_made_up[min(self._not_made_up)]

        self._starved = {}
        self._made_up = 0.0
        self._version = version
        self._served_at = now
        self._sent_at = {step: at for step, at in self._sent_at.items() if step > version}

    def look(self, wait: Wait, inflight: int, now: float) -> None:
        """The trainer's state from now on; the time since the last look had the cause of then."""
        elapsed = max(now - self._looked_at, 0.0) if self._looked_at else 0.0
        before = self._wait
        self.spent[before.cause] += elapsed
        self.load.add(before.cause, elapsed)
        self.count(inflight, now)

        if before.cause == "starved":
            self._starved[before.env] = self._starved.get(before.env, 0.0) + elapsed
        elif before.cause == "held" and elapsed:
            env = before.env or ""
            self.held[env] = self.held.get(env, 0.0) + elapsed
            # If these steps had been shorter, the wait for this group would be longer.
            for version in [each for each in self._not_made_up if each > before.version]:
                self._made_up += self._not_made_up.pop(version)

        self._wait = wait
        self._looked_at = now

    def count(self, inflight: int, now: float) -> None:
        """Rollouts in flight from now on."""
        passed = self._inflight * max(now - self._counted_at, 0.0)
        self.load.inflight += passed
        if self._wait.cause == "starved":
            self.load.inflight_starved += passed
        self.load.most = max(self.load.most, inflight)
        self._inflight = inflight
        self._counted_at = now

    def take_spent(self) -> dict[str, float]:
        """Seconds by cause since the last call."""
        spent = self.spent
        self.spent = dict.fromkeys(CAUSES, 0.0)
        return spent

    def take_held(self) -> dict[str, float]:
        """Seconds ``held`` by env since the last call; an env that was named stays."""
        held = self.held
        self.held = dict.fromkeys(held, 0.0)
        return held

    @property
    def last_seconds(self) -> float:
        """Seconds of the last step; 0.0: no step has been trained."""
        return self._cycles[-1] if self._cycles else 0.0

    @property
    def training(self) -> float | None:
        """Seconds of the trainer per step. None: no step has been trained."""
        return median_low(self._training) if self._training else None

    @property
    def cycle(self) -> float:
        """Mean seconds of a step."""
        return fmean(self._cycles)
