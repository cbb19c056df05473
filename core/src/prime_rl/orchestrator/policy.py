"""The live policy: which version samples now, and the watcher that swaps new weights in while
rollouts go on."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from prime_rl.broadcast.meeting import STABLE
from prime_rl.inference.client import EngineGone
from prime_rl.inference.fleet import Fleet
from prime_rl.plugins.errors import EngineError
from prime_rl.run.tail import Tail

log = logging.getLogger(__name__)

POLL_SECONDS = 0.02

GONE_SECONDS = 0.5
"""Between two attempts to update engines of which none is there."""


class TrainerStep(msgspec.Struct):
    """One line of the trainer's own metrics file."""

    step: int
    time: float
    metrics: dict[str, float | None]


class Policy:
    """Knows the version every engine samples from; others wait on it."""

    def __init__(self, version: int = 0) -> None:
        self.version = version
        self._changed = asyncio.Condition()

    async def advance(self, version: int) -> None:
        """Note that the engines sample from ``version`` now, and wake who waits for it."""
        async with self._changed:
            self.version = version
            self._changed.notify_all()

    async def wait_for(self, version: int) -> None:
        """Until the engines sample from ``version`` or a later one."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.version >= version)


class WeightWatcher:
    """Takes the newest published version to the engines, as soon as it is whole."""

    def __init__(
        self,
        run_dir: Path,
        policy: Policy,
        fleet: Fleet,
        *,
        on_pending: Callable[[int], Awaitable[None]],
        on_version: Callable[[int], None],
        on_step: Callable[[TrainerStep], None],
    ) -> None:
        self._broadcasts = run_dir / "broadcasts"
        self._steps = TrainerLog(run_dir / "trainer.jsonl")
        self._policy = policy
        self._fleet = fleet
        self._on_pending = on_pending
        self._on_version = on_version
        self._on_step = on_step
        self.update_seconds = 0.0
        self.update_count = 0

    async def run(self) -> None:
        """Poll until cancelled. Versions may be skipped: the newest one counts."""
        while True:
            newest = newest_version(self._broadcasts)
            if newest is not None and newest > self._policy.version:
                await self._update_or_skip(newest)
            else:
                await asyncio.sleep(POLL_SECONDS)

    async def _update_or_skip(self, version: int) -> None:
        """A version that a newer one has replaced while it was being loaded is skipped. While no
        engine is there it is tried on: the first to come back brings it along."""
        try:
            await self._update(version)
        except EngineGone:
            await asyncio.sleep(GONE_SECONDS)  # how often: ``Fleet.run`` ends it
        except EngineError:
            newest = newest_version(self._broadcasts)
            if newest is None or newest <= version:
                raise
            log.warning("version %d was not loaded, going on with %d", version, newest)

    async def _update(self, version: int) -> None:
        for step in self._steps.read_new():
            self._on_step(step)
        await self._on_pending(version)
        self.update_seconds = await self._fleet.update_weights(
            self._broadcasts / f"step_{version}", version
        )
        self.update_count += 1
        await self._policy.advance(version)
        self._on_version(version)


class TrainerLog:
    """Follows the trainer's metrics file."""

    def __init__(self, path: Path) -> None:
        self._tail = Tail(path)

    def read_new(self) -> list[TrainerStep]:
        """Steps written since the last call."""
        return [msgspec.json.decode(line, type=TrainerStep) for line in self._tail.new_lines()]


def newest_version(broadcasts: Path) -> int | None:
    """The highest version whose folder is whole; None if there is none. Stray names are passed
    over."""
    try:
        names = [entry.name for entry in broadcasts.iterdir()]
    except FileNotFoundError:
        return None
    versions = [int(n[5:]) for n in names if n.startswith("step_") and n[5:].isdigit()]
    for version in sorted(versions, reverse=True):
        if (broadcasts / f"step_{version}" / STABLE).exists():
            return version
    return None
