"""An end to a run in which nothing moves."""

from __future__ import annotations

import asyncio
import time

from pydantic import PositiveFloat

from prime_rl import Observer, PluginConfig, RunError
from prime_rl.rundir.status import trainer_works

LOOK_SECONDS = 1.0
"""Between two looks."""


class WatchdogConfig(PluginConfig):
    """``[observers.watchdog]``."""

    timeout: PositiveFloat = 1200.0
    """Seconds in which nothing moves, after which the run fails. They count while nothing is
    sampled, scored, evaluated or loaded into an engine, and the trainer only waits for a batch."""


class Watchdog(Observer):
    """Ends a run in which for ``timeout`` seconds nothing was sampled, scored or evaluated, no
    engine loaded weights, and the trainer did nothing but wait for a batch."""

    name = "watchdog"
    config_class = WatchdogConfig
    config: WatchdogConfig

    _clock = staticmethod(time.monotonic)

    async def run(self) -> None:
        """Look once a second. Raises ``RunError``."""
        shared = self.host.shared
        timeout = self.config.timeout
        seen = None
        since = self._clock()
        while True:
            version = shared.engines.policy.version
            last = shared.run.status.last
            now = version, last.state, last.waiting_for
            if now != seen or self._is_working():
                seen = now
                since = self._clock()
            elif self._clock() - since > timeout:
                raise RunError(
                    f"nothing has moved for {timeout:.0f} s (observers.watchdog.timeout): "
                    f"{last.state}, waiting for {last.waiting_for}. The engines have version "
                    f"{version}. See logs/latest/trainer.log."
                )

            await asyncio.sleep(LOOK_SECONDS)

    def _is_working(self) -> bool:
        """Whether something is running that has its own timeouts."""
        engines = self.host.shared.engines
        if self.host.is_scoring():
            return True
        if engines.policy.is_loading:
            return True
        if trainer_works(self.host.shared.run.run_dir):
            return True
        inflight = self.host.num_inflight() or engines.policy.evaluated is not None
        return bool(inflight) and not engines.fleet.asleep
