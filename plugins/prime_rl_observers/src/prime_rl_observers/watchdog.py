"""An end to a run in which nothing moves."""

from __future__ import annotations

import asyncio
import time

from prime_rl import Observer, RunError
from prime_rl.rundir.status import trainer_works

LOOK_SECONDS = 1.0
"""Between two looks."""


class Watchdog(Observer):
    """Ends a run in which for ``orchestrator.weights_timeout`` seconds nothing was sampled, scored
    or evaluated, no engine loaded weights, and the trainer did nothing but wait for a batch."""

    name = "watchdog"
    reads = ("orchestrator.weights_timeout",)

    _clock = staticmethod(time.monotonic)

    async def run(self) -> None:
        """Look once a second. Raises ``RunError``."""
        shared = self.host.shared
        timeout = shared.run.config.orchestrator.weights_timeout
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
                    f"nothing has moved for {timeout:.0f} s (orchestrator.weights_timeout): "
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
