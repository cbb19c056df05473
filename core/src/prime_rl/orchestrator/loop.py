"""The loop. Read this first: eight words, each a module of this package or the process it names.

    sampler -> rollout -> algorithm -> filters -> packer -> wire -> trainer -> weights
       ^                                                                         |
       +-------------------------------------------------------------------------+

    sampler    ``sampler.next_example`` picks an example; ``dispatcher`` opens a group for it
    rollout    ``env`` runs the episode against an engine and cuts its trajectory into samples
    algorithm  ``scoring``: score_rollout for each rollout, score_group for each complete group
    filters    ``buffer``: pre- and post-batch slots, staleness, back-fill; then ``score_batch``
    packer     ``packer``: samples end to end in rows, of each of the trainer's ranks
    wire       ``prime_rl.wire``: binary columns to the trainer
    trainer    other processes; they know no algorithm
    weights    ``policy``: the watcher loads each new version into the engines while rollouts go on

While step n trains, batch n + 1 is sampled. Nothing here asks which algorithm it runs. Evaluation,
checkpoints and reports are observers (``prime_rl.plugins.observer``). ``docs/map.md`` shows the
processes around this one, and where each thing is decided.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from prime_rl.errors import RunError
from prime_rl.orchestrator.buffer import Buffer, NothingToTrain
from prime_rl.orchestrator.checkpoint import Checkpointing
from prime_rl.orchestrator.context import RunContext
from prime_rl.orchestrator.packer import Packer
from prime_rl.orchestrator.policy import WeightWatcher
from prime_rl.orchestrator.sampling import Sampling
from prime_rl.plugins.observer import Observer
from prime_rl.rollout import Batch
from prime_rl.wire.micro_batch import encode_batch
from prime_rl.wire.transport import Sender

log = logging.getLogger(__name__)

T = TypeVar("T")


class StopRequested(Exception):
    """The user asked for the run to end."""


class Orchestrator:
    """The flow of one run."""

    def __init__(
        self,
        run: RunContext,
        sampling: Sampling,
        buffer: Buffer,
        packer: Packer,
        wire: Sender,
        weights: WeightWatcher,
        observers: Sequence[Observer],
        checkpoints: Checkpointing | None = None,
    ) -> None:
        """``observers`` are called in their order; ``sampling`` is one of them, and ``checkpoints``
        where the run saves any."""
        self.context = run
        self.observers = observers
        self.sampling = sampling
        self.buffer = buffer
        self.packer = packer
        self.wire = wire
        self.weights = weights
        self.checkpoints = checkpoints

    async def run(self, stop: asyncio.Future[None] | None = None) -> int | None:
        """Train every step. Returns None, or the last step if ``stop`` ended the run early.

        Raises the first error of any part, after the other parts are cancelled.
        """
        self.stop = stop or asyncio.get_running_loop().create_future()
        stopped = False
        try:
            async with asyncio.TaskGroup() as tasks:
                # `_train` starts the sampling, after the observers' `before_training`.
                others = [each for each in self.observers if each is not self.sampling]
                work = [self.weights.run(), *(each.run() for each in others)]
                background = [tasks.create_task(until_cancelled(each)) for each in work]

                try:
                    await self._train(tasks, background)
                except StopRequested:
                    stopped = True
                    log.info("stopped: step %d is the last", self._last)

                    if self._ends_early:
                        # Before `background`, which has the groups in flight, is cancelled.
                        for observer in self.observers:
                            await observer.stopping(self._last)

                for task in background:
                    task.cancel()
        except BaseExceptionGroup as group:
            error: BaseException = group
            # `Sampling.run` has a task group too, so groups nest. The first error is the cause.
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]

            if isinstance(error, NothingToTrain):  # its rollouts and metrics show why
                # The reporter comes last, because it logs what the other observers have counted.
                for observer in reversed(self.observers):
                    observer.batch_lost(self.buffer.batch)
            raise error from None

        last = await self._end_early() if stopped else None
        if self.checkpoints is not None:
            await self.checkpoints.settle()
        return last

    async def _train(self, tasks: asyncio.TaskGroup, background: list[asyncio.Task[None]]) -> None:
        first = self.context.launch.first_step
        last = self.context.config.max_steps

        for observer in self.observers:
            await self._unless_stopped(observer.before_training())

        sampling = until_cancelled(self.sampling.run())
        background.append(tasks.create_task(sampling))  # sampler -> rollout -> algorithm

        # Step n trains batch n and makes version n of the weights.
        for _ in range(first, last + 1):
            await self._unless_stopped(self.buffer.wait_until_full())  # filters
            await self.sampling.score_batch()  # whole, or a stop would save half of its credit
            batch = self.buffer.take()
            await self._send(batch)  # packer -> wire -> trainer

        self.context.status.report("finishing", waiting_for=f"trainer (weights of step {last})")
        await self.weights.policy.wait_for(last)  # weights

        for observer in self.observers:
            await self._unless_stopped(observer.after_training())

    async def _send(self, batch: Batch) -> None:
        """One batch, from the buffer to the trainer."""
        for observer in self.observers:
            await observer.batch_taken(batch)

        frames = self.packer.pack(batch)

        # Colocated engines go to sleep here: the trainer needs their GPUs for this batch.
        for observer in self.observers:
            await observer.batch_leaves(batch.step)

        room = f"trainer (room for batch {batch.step})"
        self.context.status.report("shipping", waiting_for=room)
        for observer in self.observers:  # first: its checkpoint may follow, and needs its records
            observer.batch_sent(batch, frames)
        started = time.perf_counter()
        await self.wire.send(batch.step, frames)
        self.context.waited.add("wait/orchestrator/trainer_room", started)

    async def _unless_stopped(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of ``work``. Raises ``StopRequested`` if the user ends the run first."""
        task = asyncio.ensure_future(until_cancelled(work))

        try:
            await asyncio.wait([task, self.stop], return_when=asyncio.FIRST_COMPLETED)
            # If both are done at the same moment, the result of the work counts.
            if task.done():
                return task.result()

            self.stop.result()  # if it failed, nobody has asked for a stop
            raise StopRequested
        finally:
            # `asyncio.wait` cancels nothing itself.
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    @property
    def _last(self) -> int:
        """The step of the batch that was sent last."""
        return self.buffer.batch.step - 1

    @property
    def _ends_early(self) -> bool:
        """Whether the trainer has to be notified of the end. Before its first step it has nothing
        to save, and after the last step it saves in any case."""
        return self.context.launch.first_step <= self._last < self.context.config.max_steps

    async def _end_early(self) -> int:
        """End with the batch that was sent last. The trainer saves the result, for which no engine
        is needed."""
        last = self._last
        if self._ends_early:
            self.context.status.report("stopping", waiting_for=f"trainer (weights of step {last})")
            await self.weights.drain(last)
            # A batch without rows is the end, for every rank.
            frame = encode_batch(last + 1, [])
            await self.wire.send(last + 1, [frame] * self.context.launch.num_ranks)
            await self.wire.drain()
        return last


async def until_cancelled(work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``. A ``CancelledError`` that comes from inside, out of the code of an
    environment or a plugin, is an error: a task group takes it for an end in order."""
    try:
        return await work
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise

        name = getattr(work, "__qualname__", work)
        raise RunError(
            f"{name} was cancelled from inside: code of an environment or a plugin "
            "raised CancelledError, or cancelled a task that is not its own. The traceback is in "
            "logs/latest/orchestrator.log."
        ) from error
