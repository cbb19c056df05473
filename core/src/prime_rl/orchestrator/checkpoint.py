"""The orchestrator's part of a checkpoint.

Written when batch N is complete and before it leaves for the trainer, or, if the run is stopped
after it, before the trainer is notified; at a moment when no group is half taken in. Then each
group requested so far is in exactly one place: decided on, for a batch up to N; scored and buffered
(saved as it is, with its credit); or in flight (requested again, under its own number, so that its
seeds are the same). A resumed run therefore requests the examples of an undisturbed one: none
skipped, none twice.

    orchestrator/sampler files           Sampler.save
    orchestrator/sources/ENV/            Source.save
    orchestrator/algorithms/ENV/         Algorithm.save
    orchestrator/curriculum/             which envs are open, if one has a gate
    orchestrator/buffered.msgpack        scored rollouts that no batch up to N has taken
    orchestrator/progress.json           last: this part is complete
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from prime_rl.errors import ConfigError, RunError
from prime_rl.orchestrator.agents import parts_of
from prime_rl.orchestrator.buffer import Buffer
from prime_rl.orchestrator.context import RunContext, TrainEnv
from prime_rl.orchestrator.curriculum import Curriculum
from prime_rl.orchestrator.dispatcher import Dispatcher, Requested
from prime_rl.orchestrator.records import decode_rollouts, encode_rollouts
from prime_rl.orchestrator.sources import ExternalSource
from prime_rl.plugins.observer import Observer
from prime_rl.plugins.sampler import Sampler
from prime_rl.registry.manager import installed_versions
from prime_rl.rollout import Batch
from prime_rl.rundir.attempts import check_current
from prime_rl.rundir.checkpoints import PROGRESS, Checkpoint, checkpoints_dir, finished, unfinished
from prime_rl.rundir.polls import poll_failed, poll_succeeded
from prime_rl.rundir.rows import read_table
from prime_rl.rundir.status import names_in, names_seen, trainer_works

log = logging.getLogger(__name__)

BUFFERED = "buffered.msgpack"

ATTEMPTS = 2
"""At writing one checkpoint."""

RETRY_SECONDS = 5.0
"""Between two attempts."""

LOOK_SECONDS = 0.5
"""Between two looks whether the trainer has completed a checkpoint."""

LAST_CHECKPOINT_SECONDS = 60.0
"""At the end, how long the trainer may do nothing before the last checkpoint is complete."""


class Progress(Requested, kw_only=True):
    """``progress.json``"""

    step: int
    saved: dict[str, str]
    """The parts that have state here, by folder, and their types: ``sampler``,
    ``algorithms/math``."""
    plugins: dict[str, str]
    """Version of each installed plugin's distribution."""
    config: dict[str, Any]
    """The resolved config under which it was written."""


class Checkpointing(Observer):
    """Writes the orchestrator's part of each checkpoint that is due: before its batch leaves, so
    that the trainer, which completes the checkpoint, finds it."""

    def __init__(
        self,
        run: RunContext,
        sampler: Sampler,
        envs: Sequence[TrainEnv],
        dispatcher: Dispatcher,
        buffer: Buffer,
        curriculum: Curriculum | None = None,
    ) -> None:
        """``curriculum``: None if no env has a gate."""
        self.context = run
        self.envs = envs
        self.dispatcher = dispatcher
        self.buffer = buffer
        self._parts: dict[str, Any] = {"sampler": sampler}
        """The parts that may have state, by the folder of their state."""
        self._saved_at = time.monotonic()
        self.observers: Sequence[Observer] = ()
        """All observers of the run, which hear that a checkpoint is complete."""
        self._begun: deque[int] = deque()
        """Steps whose checkpoint the trainer has to complete."""
        self._is_missing = False
        """Whether the oldest of these checkpoints had no folder when it was last looked for."""

        for env in envs:
            for part in parts_of(env.algorithm):
                self._parts[part.folder(env.name)] = part.algorithm
            if isinstance(env.source, ExternalSource):
                self._parts[_source_folder(env)] = env.source.source

        if curriculum is not None:
            self._parts["curriculum"] = curriculum

    async def before_training(self) -> None:
        """Announce the checkpoint that the run resumes."""
        launch = self.context.launch
        if launch.checkpoint is not None:
            await self._announce(launch.first_step - 1, launch.checkpoint.directory)

    async def run(self) -> None:
        """Tell the observers of each checkpoint that becomes complete, until cancelled."""
        while True:
            await self._look()
            await asyncio.sleep(LOOK_SECONDS)

    async def settle(self, within: float = LAST_CHECKPOINT_SECONDS) -> None:
        """At the end of the run, instead of ``run``: until each checkpoint that was begun is
        complete or given up, or the trainer has done nothing for ``within`` seconds. Returns at
        once where no observer wants to know."""
        wanted = Observer.checkpoint_complete
        if all(type(each).checkpoint_complete is wanted for each in self.observers):
            return

        deadline = time.monotonic() + within
        while True:
            await self._look()
            if not self._begun:
                return

            step = self._begun[0]
            awaited = f"trainer (checkpoint of step {step})"
            self.context.status.report("finishing", waiting_for=awaited)
            # A checkpoint may take long. Only time in which the trainer does nothing counts.
            if trainer_works(self.context.run_dir):
                deadline = time.monotonic() + within

            if time.monotonic() > deadline:
                log.warning(
                    "step %d: the checkpoint is not complete after %g s in which the trainer did "
                    "nothing, so no observer hears of it",
                    step,
                    within,
                )
                return

            await asyncio.sleep(LOOK_SECONDS)

    async def _look(self) -> None:
        """Announce what is complete, in order, and forget what the trainer has given up."""
        folder = checkpoints_dir(self.context.run_dir)
        while self._begun:
            step = self._begun[0]
            try:
                names = names_in(folder)
            except OSError as error:
                poll_failed(folder, error)
                return
            poll_succeeded(folder)
            if unfinished(self.context.run_dir, step).directory.name in names:
                self._is_missing = False
                return

            complete = finished(self.context.run_dir, step).directory
            is_complete = complete.name in names
            if not (is_complete or self._is_missing):
                self._is_missing = True  # a listing during the rename may show neither name
                return

            self._is_missing = False
            self._begun.popleft()
            if is_complete:
                await self._announce(step, complete)

    async def _announce(self, step: int, folder: Path) -> None:
        for env in self.envs:
            if isinstance(env.source, ExternalSource):
                part = Checkpoint(folder).orchestrator / _source_folder(env)
                # The config may have another source than the checkpoint. Of a part that cannot be
                # seen now, the source keeps what it has.
                try:
                    is_there = part.is_dir()
                except OSError as error:
                    poll_failed(part, error)
                    continue
                if is_there:
                    env.source.source.checkpoint_complete(part)

        for observer in self.observers:
            await observer.checkpoint_complete(step, folder)

    async def batch_taken(self, batch: Batch) -> None:
        """Write the part if the checkpoint of this step is due."""
        started = time.perf_counter()
        since = time.monotonic() - self._saved_at
        if self.context.config.ckpt.is_due(batch.step, self.context.config.max_steps, since):
            await self._write(batch.step)
            self._saved_at = time.monotonic()
        self.context.waited.add("time/save_ckpt", started)

    def batch_sent(self, batch: Batch, frames: Sequence[bytes]) -> None:
        """Save the gates again: by now they have read the metrics of this batch. The trainer, which
        completes the checkpoint, does not have the batch yet."""
        curriculum = self._parts.get("curriculum")
        if curriculum is None or batch.step not in self._begun:
            return

        part = unfinished(self.context.run_dir, batch.step).orchestrator
        try:
            curriculum.save(_folder(part, "curriculum"))
        except OSError as error:
            log.error(
                "step %d: the gates in its checkpoint lack the metrics of its batch: %s",
                batch.step,
                error,
            )

    async def stopping(self, last: int) -> None:
        """Write the part of the last step, unless it was due anyway."""
        # `batch_taken` may have written it, and the trainer may have completed it since.
        folders = (unfinished(self.context.run_dir, last), finished(self.context.run_dir, last))
        is_written = any(PROGRESS in names_seen(folder.orchestrator) for folder in folders)
        if self.context.config.ckpt.enabled and not is_written:
            await self._write(last)

    async def _write(self, step: int) -> None:
        part = unfinished(self.context.run_dir, step).orchestrator
        for attempt in range(1, ATTEMPTS + 1):
            try:
                self.save(part, step)
                self._begun.append(step)
                return
            except OSError as error:
                shutil.rmtree(part, ignore_errors=True)
                log.error("cannot write the checkpoint of step %d to %s: %s", step, part, error)
                if attempt < ATTEMPTS:
                    # The next attempt may find space that another process has freed.
                    self.context.status.report("waiting", waiting_for=f"disk ({error})")
                    await asyncio.sleep(RETRY_SECONDS)

        log.error("step %d: no checkpoint; the run goes on", step)

    def save(self, directory: Path, step: int) -> None:
        """Write the part of step ``step``, its ``progress.json`` last. Raises ``OSError``."""
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)

        for name, part in self._parts.items():
            folder = _folder(directory, name)
            folder.mkdir(parents=True, exist_ok=True)
            part.save(folder)

        scored = encode_rollouts(
            step, self.buffer.buffered, objections=self.buffer.batch.objections
        )

        (directory / BUFFERED).write_bytes(scored)
        progress = Progress(
            **msgspec.structs.asdict(self.dispatcher.requested),
            step=step,
            saved={name: type(part).name for name, part in self._parts.items()},
            plugins=installed_versions(),
            config=self.context.config.model_dump(mode="json"),
        )

        # A part with this file counts as complete, so it is written last and by one rename.
        temporary = directory / f".{PROGRESS}"
        temporary.write_bytes(msgspec.json.format(msgspec.json.encode(progress)))
        # An attempt that was replaced wakes up late, and must not write over the newer one.
        check_current()
        temporary.replace(directory / PROGRESS)

    def restore(self, directory: Path) -> None:
        """Continue from the state that ``save`` wrote. Parts that the config has changed start
        afresh, with a warning. Raises ``ConfigError`` if a part does not fit."""
        path = directory / PROGRESS
        try:
            progress: Progress = read_table(path, Progress)
        except (OSError, RunError) as error:
            raise ConfigError(f"--resume: {error}") from error

        for name, part in self._parts.items():
            before = progress.saved.get(name)
            if before == type(part).name:
                part.load(_folder(directory, name))
                continue

            saved = "none" if before is None else f"{before!r}'s state"
            log.warning("%s %r starts afresh: the checkpoint has %s", name, type(part).name, saved)

        self.dispatcher.resume(progress)

        # The config may have lost an env since the checkpoint.
        env_names = {env.name for env in self.envs}
        stored = decode_rollouts(directory / BUFFERED)
        buffered = [each for each in stored["rollouts"] if each.rollout.env in env_names]
        self.buffer.restore(
            [(each.rollout, each.dropped_by) for each in buffered],
            objections={id(each.rollout): each.objections for each in buffered},
        )
        log.info("%d scored rollouts were buffered", len(buffered))


def _source_folder(env: TrainEnv) -> str:
    return f"sources/{env.name}"


def _folder(directory: Path, name: str) -> Path:
    """The sampler's files lie in the part itself: ``orchestrator.sampler.load_from`` names it."""
    return directory if name == "sampler" else directory / name
