"""Observers that keep a run alive: engines that are current, and an end to a run in which nothing
moves."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from prime_rl.errors import RunError
from prime_rl.orchestrator.context import Engines, RunContext
from prime_rl.orchestrator.sampling import Sampling
from prime_rl.plugins.observer import Observer

LOOK_SECONDS = 1.0
"""Between two looks of the watchdog."""


class EngineKeeper(Observer):
    """Keeps the engines current. Colocated, they sleep while the trainer steps."""

    def __init__(self, run: RunContext, engines: Engines, installed: Sequence[Observer]) -> None:
        """``installed``: observers that plugins brought."""
        self.context, self.engines, self._installed = run, engines, installed

    async def run(self) -> None:
        """Raises ``EngineError`` when no engine has served for too long."""
        await self.engines.fleet.run()

    async def batch_leaves(self, step: int) -> None:
        """Colocated: put the engines to sleep until version ``step`` wakes them. Requests in flight
        stay there; work that needs the present version is completed first."""
        if not self.context.config.deployment.colocated:
            return
        started, awaited = time.perf_counter(), f"trainer (weights of step {step - 1})"
        self.context.status.report(f"batch {step} is ready", waiting_for=awaited)
        await self.engines.policy.wait_for(step - 1)
        for observer in self._installed:
            await observer.version_pending(step)
        await self.engines.fleet.sleep()
        self.context.waited.add("time/sleep_engines", started)


class Watchdog(Observer):
    """Ends a run in which for ``orchestrator.weights_timeout`` seconds nothing was sampled, scored
    or evaluated, and no process made progress."""

    def __init__(
        self,
        run: RunContext,
        engines: Engines,
        sampling: Sampling,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.context, self.engines, self.sampling = run, engines, sampling
        self._clock = clock

    async def run(self) -> None:
        """Look once a second. Raises ``RunError``."""
        timeout, seen, since = self.context.config.orchestrator.weights_timeout, None, self._clock()
        while True:
            version, last = self.engines.policy.version, self.context.status.last
            now = version, last.state, last.waiting_for
            if now != seen or self._is_working():
                seen, since = now, self._clock()
            elif self._clock() - since > timeout:
                raise RunError(
                    f"nothing has moved for {timeout:.0f} s (orchestrator.weights_timeout): "
                    f"{last.state}, waiting for {last.waiting_for}. The engines have version "
                    f"{version}. See logs/latest/trainer.log."
                )
            await asyncio.sleep(LOOK_SECONDS)

    def _is_working(self) -> bool:
        """Whether something is running that has its own timeouts."""
        if self.sampling.is_scoring:
            return True
        inflight = self.sampling.num_inflight or self.engines.policy.evaluated is not None
        return bool(inflight) and not self.engines.fleet.asleep
