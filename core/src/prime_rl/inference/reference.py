"""Score tokens under a model behind HTTP: the replicas of a frozen one.

    logprobs(tokens) -> [slot] -> [replica] -> POST /inference/v1/generate {prompt_logprobs: 0}
                          ^           |
                          +-- wait ---+   no answer, 429 or 5xx: another replica, else try again

An outage pauses who asks and names the endpoint; a refusal ends the run with its reason.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from prime_rl.config.models import FrozenModel
from prime_rl.errors import ConfigError, EngineError
from prime_rl.inference.scorer import Endpoint, Scorer, Unavailable
from prime_rl.rollout import FloatColumn

log = logging.getLogger(__name__)

FAILED_TRIES = 10
"""Times one request may meet an internal error (500) of a server that answers other requests."""


@dataclass(eq=False)
class _Replica(Endpoint):
    """One endpoint, and its outage if it has one."""

    failures: int = 0
    """Tries in a row that got no answer."""
    answered: int = 0
    """Requests it has answered so far."""
    retry_at: float = 0.0
    """Not to be asked before this (``time.monotonic``)."""
    down_since: float = 0.0
    reason: str = ""


class ScoringPool(Scorer):
    """A ``ReferenceModel`` over one or more replicas of one frozen model.

    ``on_waiting`` is told whom requests wait for when no replica answers, and None when nobody
    waits any more. ``backoff``: seconds before the second try, doubling up to the other bound.
    Other arguments: ``Scorer``.
    """

    def __init__(
        self,
        urls: Sequence[str],
        model: str,
        *,
        on_waiting: Callable[[str | None], None] = lambda text: None,
        backoff: tuple[float, float] = (1.0, 10.0),
        **options: Any,
    ) -> None:
        super().__init__(urls, model, **options)
        self._replicas = [_Replica(endpoint.root) for endpoint in self._endpoints]
        self._on_waiting, self._backoff = on_waiting, backoff
        self._stranded = 0

    @classmethod
    def frozen(
        cls, model: FrozenModel, *, where: str, on_waiting: Callable[[str | None], None]
    ) -> ScoringPool:
        """A pool for a table of the TOML. Raises ``ConfigError`` if its key is not in the
        environment."""
        key = None if model.api_key_var is None else os.environ.get(model.api_key_var)
        if model.api_key_var is not None and not key:
            raise ConfigError(
                f"{where} {model.name!r}: api_key_var = {model.api_key_var!r}, and the environment "
                "has no such variable, or an empty one. Export it, or leave api_key_var out if the "
                "endpoint needs no key."
            )
        return cls(
            model.base_url,
            model.name,
            where=where,
            api_key=key,
            max_concurrency=model.max_concurrency,
            timeout=model.timeout,
            on_waiting=on_waiting,
        )

    async def wait_ready(self, timeout: float) -> None:
        """Until every replica is healthy and lists the model.

        Raises ``EngineError`` after ``timeout`` seconds, ``ConfigError`` if one serves other
        models or wants a key.
        """
        deadline = time.monotonic() + timeout
        try:
            for replica in self._replicas:
                await self._wait_for(replica, deadline, timeout)
        finally:
            self._on_waiting(None)

    @property
    def max_model_len(self) -> int | None:
        """Tokens every replica takes, once ``wait_ready`` is over; None: nobody says."""
        known = [r.card.max_model_len for r in self._replicas if r.card and r.card.max_model_len]
        return min(known, default=None)

    # -- one request, until it is answered --------------------------------------------------------

    async def _until_answered(self, ids: list[int], group_id: int) -> FloatColumn:
        stranded, tries = False, 0
        answered = sum(replica.answered for replica in self._replicas)
        try:
            while True:
                replica = self._choose(group_id)
                if replica is None:
                    self._stranded += not stranded
                    stranded = True
                    self._on_waiting(self._outage())
                    await self._sleep()
                    continue
                try:
                    column = await self._score(replica, ids)
                except Unavailable as error:
                    tries += error.failed
                    others = sum(each.answered for each in self._replicas) - answered
                    if tries >= FAILED_TRIES and others:
                        raise EngineError(
                            f"{self._at(replica)} failed on one request of {len(ids)} tokens "
                            f"{tries} times and answered others meanwhile: {error}. See its log."
                        ) from error
                    self._note_down(replica, str(error))
                else:
                    self._note_up(replica)
                    replica.answered += 1
                    return column
        finally:
            self._stranded -= stranded
            if stranded and not self._stranded:
                self._on_waiting(None)

    def _choose(self, group_id: int) -> _Replica | None:
        """The group's own replica, or the next one that is not resting after a failure."""
        now, number = time.monotonic(), len(self._replicas)
        for offset in range(number):
            replica = self._replicas[(group_id + offset) % number]
            if replica.retry_at <= now:
                return replica
        return None

    async def _sleep(self) -> None:
        wake = min(replica.retry_at for replica in self._replicas)
        await asyncio.sleep(max(0.0, wake - time.monotonic()))

    # -- outages ----------------------------------------------------------------------------------

    def _note_down(self, replica: _Replica, reason: str) -> None:
        """Let it rest, longer each time. Requests that fail together count as one try."""
        now = time.monotonic()
        if not replica.failures:
            replica.down_since = now
            replica.card = None  # it may come back as another model
            log.warning("%s is away: %s; trying on", self._at(replica), reason)
        if replica.retry_at <= now:
            first, longest = self._backoff
            replica.retry_at = now + min(longest, first * 2**replica.failures)
            replica.failures = min(replica.failures + 1, 32)
        replica.reason = reason

    def _note_up(self, replica: _Replica) -> None:
        if replica.failures:
            away = time.monotonic() - replica.down_since
            log.warning("%s answers again after %.1f s", self._at(replica), away)
        replica.failures, replica.retry_at = 0, 0.0

    async def _wait_for(self, replica: _Replica, deadline: float, timeout: float) -> None:
        while True:
            try:
                health = await self._request("GET", replica, "/health")
                if not health.is_success and health.status_code != 404:  # not every server has it
                    raise ConfigError(await self._refusal(replica, "/health", health))
                await self._learn(replica, ConfigError)
            except Unavailable as error:
                self._note_down(replica, str(error))
            else:
                return self._note_up(replica)
            self._on_waiting(self._outage(replica))
            left = deadline - time.monotonic()
            if left <= 0:
                raise EngineError(
                    f"{self._at(replica)} is not ready after {timeout:g} s: {replica.reason}. "
                    "Start it, or mend the base_url."
                )
            await asyncio.sleep(min(left, max(0.0, replica.retry_at - time.monotonic())))

    def _outage(self, *replicas: _Replica) -> str:
        """Whom the requests wait for, and why."""
        away = [f"{each.root} ({each.reason})" for each in replicas or self._replicas]
        return f"{self.where} {self.model!r} at {', '.join(away)}"
