"""The live policy: the version that samples now, and the watcher that loads new weights into the
engines while rollouts continue."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from prime_rl.errors import EngineError, EngineGone, RunError
from prime_rl.inference.fleet import Fleet
from prime_rl.plugins.observer import Observer
from prime_rl.rundir.rows import Tail, last_lines, parse_row
from prime_rl.rundir.status import trainer_works
from prime_rl.weights.versions import newest_version, only_in_memory, want_files

log = logging.getLogger(__name__)

POLL_SECONDS = 0.02

GONE_SECONDS = 0.5
"""Between two attempts to update, while no engine answers."""

STEP_METRIC = "loss/mean"
"""Of every step that was trained, and of the trainer only."""

REPORTED_BYTES = 1 << 24
"""How much of the end of ``metrics.jsonl`` is read for the last step of the trainer."""

LAST_WEIGHTS_SECONDS = 1200.0
"""At a stop, how long the trainer may do nothing before the weights of the last step are there."""


class TrainerStep(msgspec.Struct):
    """One line of the trainer's own metrics file."""

    step: int
    metrics: dict[str, float | None]


def last_reported(run_dir: Path, version: int) -> int:
    """The last step whose metrics of the trainer were logged before a run resumes with ``version``.

    An orchestrator that was killed may have read less than the checkpoint contains: it reads a
    step's metrics before it loads the step's weights, and an evaluation may hold these back. Steps
    whose batches are not in the file either were reported elsewhere: the file was not in use.
    """
    try:
        lines = last_lines(run_dir / "metrics.jsonl", REPORTED_BYTES)
    except OSError:  # the run is new, or has another monitor only
        return version

    reported = 0
    of_batches: set[int] = set()
    for line in lines:
        with suppress(ValueError, RecursionError):  # a damaged line
            row = parse_row(line)
            if STEP_METRIC in row:
                reported = int(row["step"])
            else:
                of_batches.add(int(row["step"]))

    missing = (step for step in of_batches if reported < step <= version)
    return min(missing, default=version + 1) - 1


class LivePolicy:
    """The version that every engine samples from."""

    def __init__(self, version: int = 0) -> None:
        self.version = version
        self.evaluated: float | None = None
        """Progress of an evaluation of this version, 0 to 1; None: none is running. Written by the
        observer that evaluates."""
        self.is_loading = False
        """Engines load another version now."""
        self._changed = asyncio.Condition()

    async def advance(self, version: int) -> None:
        """The engines sample from ``version`` now: wake the tasks that wait for it."""
        async with self._changed:
            self.version = version
            self._changed.notify_all()

    async def wait_for(self, version: int) -> None:
        """Until the engines sample from ``version`` or a later one."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.version >= version)


class WeightWatcher:
    """Loads the newest published version into the engines, as soon as it is complete."""

    def __init__(
        self, run_dir: Path, policy: LivePolicy, fleet: Fleet, observers: Sequence[Observer]
    ) -> None:
        self._broadcasts = run_dir / "broadcasts"
        self._steps = Tail(run_dir / "trainer.jsonl")
        self.policy = policy
        self._fleet = fleet
        self._observers = observers
        self.announced: Callable[[int], Awaitable[None]] = lambda _: asyncio.sleep(POLL_SECONDS)
        """``Sender.announced``, in a run."""
        self._next_step = last_reported(run_dir, policy.version) + 1
        self._update_seconds = 0.0
        self._num_updates = 0

    async def run(self) -> None:
        """Until cancelled. Versions may be skipped: the newest one counts."""
        self._read_steps()  # what the attempt before has trained and not reported

        while True:
            newest = newest_version(self._broadcasts)
            if newest is not None and newest > self.policy.version:
                await self._update_or_skip(newest)
            else:
                await self.announced(self.policy.version)

    async def drain(self, version: int, within: float = LAST_WEIGHTS_SECONDS) -> None:
        """Instead of ``run``, when a run is stopped: until the trainer has published ``version`` as
        files. No engine loads it, so a version in memory is requested as files. Raises ``RunError``
        if none comes for ``within`` seconds in which the trainer does nothing."""
        newest = -1  # none was seen
        deadline = time.monotonic() + within
        while True:
            is_in_memory = only_in_memory(self._broadcasts / f"step_{newest}")
            if newest >= version and not is_in_memory:
                break

            if is_in_memory:
                want_files(self._broadcasts)

            # A step may take an hour. Only time in which the trainer does nothing counts.
            if trainer_works(self._broadcasts.parent):
                deadline = time.monotonic() + within

            if time.monotonic() > deadline:
                lacks = f"the weights of step {version}, the last, are not in {self._broadcasts}"
                raise RunError(f"{lacks} after {within:g} s in which the trainer did nothing")

            await asyncio.sleep(POLL_SECONDS)
            published = newest_version(self._broadcasts)
            if published not in (None, newest):
                newest = published
                deadline = time.monotonic() + within  # a new version shows that the trainer works

        # No later update reads the metrics of the last steps.
        self._read_steps()

    async def _update_or_skip(self, version: int) -> None:
        """Skip a version that a newer one has replaced while it was being loaded. Retry while no
        engine answers: the first that is back gets it."""
        try:
            await self._update(version)
        except EngineGone:
            await asyncio.sleep(GONE_SECONDS)  # without a limit here: ``Fleet.run`` has one
        except EngineError:
            # The trainer deletes old versions: this one may have gone while it was being loaded.
            newest = newest_version(self._broadcasts) or 0
            if newest <= version:
                raise

            log.warning("version %d was not loaded, going on with %d", version, newest)

    async def _update(self, version: int) -> None:
        # The trainer writes a step's metrics before it announces the version that the step made.
        self._read_steps()

        # Observers may hold the version back until the present one is no longer needed.
        for observer in self._observers:
            await observer.version_pending(version)

        self.policy.is_loading = True
        try:
            self._update_seconds = await self._fleet.update_weights(
                self._broadcasts / f"step_{version}", version
            )
        finally:
            self.policy.is_loading = False

        self._num_updates += 1
        await self.policy.advance(version)

        for observer in self._observers:
            observer.version_served(version)

    def take_metrics(self) -> dict[str, float]:
        return {
            "watcher/policy_version": float(self.policy.version),
            "watcher/update_count": float(self._num_updates),
            "watcher/last_update_weights_time": self._update_seconds,
            "time/engines_paused": self._fleet.take_paused(),
        }

    def _read_steps(self) -> None:
        for line in self._steps.new_lines():
            try:
                step = msgspec.json.decode(line, type=TrainerStep)
            except (ValueError, RecursionError) as error:
                log.warning("trainer.jsonl: a line is left out: %s: %.80r", error, line)
                continue

            # Earlier lines are of the previous attempt, or were read before the file was replaced.
            if step.step >= self._next_step:
                self._next_step = step.step + 1
                # JSON has no NaN: the trainer writes null for it.
                metrics = {name: math.nan if v is None else v for name, v in step.metrics.items()}
                for observer in self._observers:
                    observer.step_trained(step.step, metrics)
