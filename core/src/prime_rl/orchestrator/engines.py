"""The status of the engines, and what keeps them current."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from prime_rl.errors import RunError
from prime_rl.inference.client import NoAnswer
from prime_rl.inference.engine import EngineState, Replica
from prime_rl.inference.fleet import Fleet
from prime_rl.orchestrator.context import Engines, RunContext
from prime_rl.plugins.observer import Observer
from prime_rl.plugins.status import STARTING, EngineFacts, Facts
from prime_rl.rundir.launch import Launch
from prime_rl.rundir.polls import poll_failed, poll_succeeded
from prime_rl.rundir.status import Status

FOLLOW_SECONDS = 1.0
"""Between two looks whether engines join or leave."""


def report_engines(fleet: Fleet, status: Status) -> None:
    """Write the state of each engine into a status file: for the live view, and for the
    supervisor, which restarts engines that have served and then die or hang."""
    named = [(fleet.names.get(engine.url, engine.url), engine) for engine in fleet.engines]
    away = [f"{name}{_why(engine)}" for name, engine in named if not engine.in_service]
    state = f"{len(named) - len(away)} of {len(named)} serve"
    waiting_for = ", ".join(away) or None
    if fleet.asleep:
        state = "asleep"
        waiting_for = waiting_for or "trainer"

    details: dict[str, Any] = {name: _state(engine) for name, engine in named}
    status.report(
        state,
        waiting_for=waiting_for,
        facts=Facts(engines={name: _facts(engine) for name, engine in named}),
        **details,
    )


def _state(engine: Replica) -> str:
    if engine.state is EngineState.HUNG:
        return f"hung ({engine.hangs})"
    if engine.in_service:
        return f"version {engine.version}"
    return "away" if engine.has_served else STARTING


def _facts(engine: Replica) -> EngineFacts:
    is_silent = engine.state is EngineState.HUNG
    return EngineFacts(
        version=engine.version if engine.in_service and not is_silent else None,
        has_served=engine.has_served or engine.in_service,
        silence=engine.hangs if is_silent else None,
    )


def _why(engine: Replica) -> str:
    """The answer that it gives instead of serving."""
    silent = engine.problem is None or isinstance(engine.problem, NoAnswer)
    return "" if silent else f": {engine.reason}"


class EngineKeeper(Observer):
    """Keeps the engines current. Colocated, they sleep while the trainer steps."""

    def __init__(self, run: RunContext, engines: Engines, installed: Sequence[Observer]) -> None:
        """``installed``: the observers that plugins brought."""
        self.context = run
        self.engines = engines
        self._installed = installed

    async def run(self) -> None:
        """Raises ``EngineError`` when no engine has served for too long."""
        await asyncio.gather(self._follow(), *(fleet.run() for fleet in self.engines.fleets))

    async def _follow(self) -> None:
        """Engines join and leave as the launch facts say."""
        urls = self.context.launch.engine_urls
        facts = self.context.run_dir / "configs" / "launch.json"
        while True:
            await asyncio.sleep(FOLLOW_SECONDS)
            try:
                launch = Launch.read(self.context.run_dir)
            except RunError as error:  # the last facts count until it can be read again
                poll_failed(facts, error)
                continue
            poll_succeeded(facts)
            if launch.engine_urls != urls:
                urls = launch.engine_urls
                self.engines.fleet.follow(urls, launch.engine_names)

    async def version_pending(self, version: int) -> None:
        """Earlier weights first: what is scored from now on sees them."""
        for engine in self.engines.earlier.values():
            await engine.follow(version)

    def version_served(self, version: int) -> None:
        self.engines.awake.go_on()

    async def batch_leaves(self, step: int) -> None:
        """Colocated: put the engines to sleep until version ``step`` wakes them. Requests in flight
        stay there; work that needs the present version is completed first."""
        if not self.context.config.deployment.colocated:
            return

        started = time.perf_counter()
        awaited = f"trainer (weights of step {step - 1})"
        self.context.status.report(f"batch {step} is ready", waiting_for=awaited)

        await self.engines.policy.wait_for(step - 1)
        # Observers finish their work on the present weights while the engines are awake.
        for observer in self._installed:
            await observer.version_pending(step)
        self.engines.awake.stop()
        await self.engines.fleet.sleep()
        self.context.waited.add("time/sleep_engines", started)
