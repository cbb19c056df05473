"""Keeps the engines of a run current, measured and, colocated, asleep while the trainer steps."""

from __future__ import annotations

import asyncio
import time

from prime_rl.monitor.engines import EngineWatch
from prime_rl.orchestrator.context import Engines, RunContext
from prime_rl.orchestrator.observers import Observer


class EngineKeeper(Observer):
    """Keeps the engines current and measured. Colocated, they sleep while the trainer steps."""

    def __init__(self, run: RunContext, engines: Engines, evaluation: Observer) -> None:
        self.context, self.engines, self._evaluation = run, engines, evaluation
        self.watch = EngineWatch(engines.fleet.pages)

    async def run(self) -> None:
        """Until cancelled. Raises ``EngineError`` when no engine has served for too long."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.engines.fleet.run())
            tasks.create_task(self.watch.run())

    async def batch_leaves(self, step: int) -> None:
        """Colocated: put the engines to sleep until version ``step`` wakes them. Requests in flight
        stay there; an evaluation is completed first."""
        if not self.context.config.deployment.colocated:
            return
        started, awaited = time.perf_counter(), f"trainer (weights of step {step - 1})"
        self.context.status.report(f"batch {step} is ready", waiting_for=awaited)
        await self.engines.policy.wait_for(step - 1)
        await self._evaluation.version_pending(step)
        await self.engines.fleet.sleep()
        self.context.waited.add("time/sleep_engines", started)
