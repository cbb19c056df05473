"""The engines of a frozen model, which the run neither starts nor updates: a teacher, a judge.

They are looked at only while they do not serve: the endpoint may be a hosted service.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Hashable, Sequence
from typing import Any

from prime_rl.config.models import FrozenModel
from prime_rl.errors import ConfigError, EngineError
from prime_rl.inference import timing
from prime_rl.inference.client import EngineClient, Refused
from prime_rl.inference.engine import Engine
from prime_rl.inference.pool import EnginePool, T, end


class FrozenPool(EnginePool):
    """``where``: whose model it is, in messages: ``env 'a': teacher``."""

    def __init__(
        self,
        urls: Sequence[str],
        model: str,
        *,
        where: str,
        api_key: str | None = None,
        on_waiting: Callable[[str | None], None] = lambda text: None,
        poll: float = timing.POLL_SECONDS,
    ) -> None:
        self.label = f"{where} {model!r}"
        clients = [EngineClient(url, api_key) for url in urls]
        engines = [
            Engine(number, client, f"{self.label} at {client.url}")
            for number, client in enumerate(clients)
        ]
        super().__init__(engines, f"{self.label} at", model, poll=poll)
        self.on_waiting = on_waiting
        self._watching: asyncio.Task[None] | None = None

    @classmethod
    def of(
        cls, model: FrozenModel, *, where: str, on_waiting: Callable[[str | None], None]
    ) -> FrozenPool:
        """The pool of a table of the TOML. Raises ``ConfigError`` if its key is not in the
        environment."""
        key = None if model.api_key_var is None else os.environ.get(model.api_key_var)
        if model.api_key_var is not None and not key:
            raise ConfigError(
                f"{where} {model.name!r}: api_key_var = {model.api_key_var!r}, and the environment "
                "has no such variable, or an empty one. Export it, or leave api_key_var out if the "
                "endpoint needs no key."
            )
        return cls(model.base_url, model.name, where=where, api_key=key, on_waiting=on_waiting)

    @property
    def max_model_len(self) -> int | None:
        """Tokens that every engine takes, once ``wait_ready`` has returned; None: unknown."""
        limits = [engine.client.health.max_model_len for engine in self.engines]
        return min((limit for limit in limits if limit), default=None)

    async def wait_ready(self, timeout: float) -> None:
        """Until every engine is healthy and lists the model.

        Raises ``EngineError`` after ``timeout`` seconds, ``ConfigError`` if one serves other
        models or refuses the key.
        """
        self._begin()
        try:
            async with asyncio.timeout(timeout):
                while missing := [engine for engine in self.engines if not engine.serving]:
                    self._check(ConfigError)
                    self.on_waiting(self.outage())
                    await self._changed.wait()
        except TimeoutError:
            raise EngineError(
                f"{missing[0].label} is not ready after {timeout:g} s: {missing[0].reason}. "
                "Start it, or fix the base_url."
            ) from None
        finally:
            self.on_waiting(None)

    async def ask(
        self,
        key: Hashable,
        work: Callable[[Engine], Awaitable[T]],
        tries: int = timing.EPISODE_TRIES,
    ) -> T:
        self._begin()
        return await super().ask(key, work, tries)

    async def close(self) -> None:
        if self._watching is not None:
            await end(self._watching)
        await super().close()

    def _begin(self) -> None:
        if self._watching is None:
            self._watching = asyncio.ensure_future(self.watch())
            self._watching.add_done_callback(lambda task: self._notify())

    async def _until_next_look(self, engine: Engine, pause: float) -> None:
        if engine.serving and engine.lost is not None:
            await asyncio.wait([engine.lost])
        await asyncio.sleep(pause)

    def _check_waiting(self) -> None:
        self._check(EngineError)

    def _check(self, kind: type[ConfigError | EngineError]) -> None:
        if self._watching is not None and self._watching.done():
            self._watching.result()
        for engine in self.engines:
            problem: Any = engine.problem
            if isinstance(problem, Refused):
                raise kind(f"{engine.label}: {problem}. {problem.fix}")
