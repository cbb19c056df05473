"""The engines of a frozen model, which the run neither starts nor updates: a teacher, a judge.

They are looked at only while they do not serve, and when a request has failed: the endpoint may be
a hosted service.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence

from prime_rl.config.models import FrozenModel
from prime_rl.errors import ConfigError, EngineError
from prime_rl.inference import timing
from prime_rl.inference.client import EngineClient, EngineRefused, Health
from prime_rl.inference.engine import Engine
from prime_rl.inference.pool import EnginePool


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
        clients = [EngineClient(url, api_key, label=f"{self.label} at") for url in urls]
        super().__init__(list(map(Engine, range(len(urls)), clients)), model, poll=poll)
        self.on_waiting = on_waiting

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

    async def _until_next_look(self, engine: Engine, pause: float) -> None:
        if engine.serving and engine.lost is not None:
            await asyncio.wait([engine.lost])
        await asyncio.sleep(pause)

    async def _look(self, engine: Engine) -> Health | None:
        if engine.serving and engine.problem is None:
            # The last look may be hours ago; the patience with a silent engine begins here.
            engine.ready_at = time.monotonic()
        return await super()._look(engine)

    def _check(self, kind: type[ConfigError | EngineError]) -> None:
        super()._check(kind)
        for engine in self.engines:
            if isinstance(problem := engine.problem, EngineRefused):
                raise kind(f"{problem}. {problem.fix}")
