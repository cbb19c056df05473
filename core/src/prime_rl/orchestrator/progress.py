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
    orchestrator/buffered.msgpack        scored rollouts that no batch up to N has taken
    orchestrator/progress.json           last: this part is complete
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from prime_rl.errors import ConfigError
from prime_rl.orchestrator.buffer import Buffer
from prime_rl.orchestrator.context import RunContext, TrainEnv
from prime_rl.orchestrator.dispatcher import Dispatcher, Requested
from prime_rl.orchestrator.records import decode_rollouts, encode_rollouts
from prime_rl.orchestrator.sources import ExternalSource
from prime_rl.plugins.observer import Observer
from prime_rl.plugins.sampler import Sampler
from prime_rl.registry.manager import installed_versions
from prime_rl.rollout import Batch
from prime_rl.rundir.attempts import check_current
from prime_rl.rundir.checkpoints import PROGRESS, finished, unfinished

log = logging.getLogger(__name__)

BUFFERED = "buffered.msgpack"

RETRY_SECONDS = 5.0
"""Before the second and last attempt at a checkpoint after a failed write."""


class Progress(Requested, kw_only=True):
    """``progress.json``"""

    step: int
    saved: dict[str, str]
    """What has state here, by folder, and its type: ``sampler``, ``algorithms/math``."""
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
    ) -> None:
        self.context = run
        self.envs = envs
        self.dispatcher = dispatcher
        self.buffer = buffer
        self._parts: dict[str, Any] = {"sampler": sampler}
        """What may have state, by the folder that it is saved in."""
        self._saved_at = time.monotonic()
        for env in envs:
            self._parts[f"algorithms/{env.name}"] = env.algorithm
            if isinstance(env.source, ExternalSource):
                self._parts[f"sources/{env.name}"] = env.source.source

    async def batch_taken(self, batch: Batch) -> None:
        """Write the part if the checkpoint of this step is due."""
        started = time.perf_counter()
        since = time.monotonic() - self._saved_at
        if self.context.config.ckpt.is_due(batch.step, self.context.config.max_steps, since):
            await self._write(batch.step)
            self._saved_at = time.monotonic()
        self.context.waited.add("time/save_ckpt", started)

    async def stopping(self, last: int) -> None:
        """Write the part of the last step, unless it was due anyway."""
        there = unfinished(self.context.run_dir, last), finished(self.context.run_dir, last)
        if self.context.config.ckpt.enabled and not any(each.progress.exists() for each in there):
            await self._write(last)

    async def _write(self, step: int) -> None:
        part = unfinished(self.context.run_dir, step).orchestrator
        for wait in (RETRY_SECONDS, None):
            try:
                return self.save(part, step)
            except OSError as error:
                shutil.rmtree(part, ignore_errors=True)
                log.error("cannot write the checkpoint of step %d to %s: %s", step, part, error)
                if wait is not None:
                    self.context.status.report("waiting", waiting_for=f"disk ({error})")
                    await asyncio.sleep(wait)

        log.error("step %d: no checkpoint; the run goes on", step)

    def save(self, directory: Path, step: int) -> None:
        """Write the part of step ``step``, its ``progress.json`` last. Raises ``OSError``."""
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        for name, part in self._parts.items():
            folder = _folder(directory, name)
            folder.mkdir(parents=True, exist_ok=True)
            part.save(folder)

        (directory / BUFFERED).write_bytes(encode_rollouts(step, self.buffer.buffered))
        progress = Progress(
            **msgspec.structs.asdict(self.dispatcher.requested),
            step=step,
            saved={name: type(part).name for name, part in self._parts.items()},
            plugins=installed_versions(),
            config=self.context.config.model_dump(mode="json"),
        )
        temporary = directory / f".{PROGRESS}"
        temporary.write_bytes(msgspec.json.format(msgspec.json.encode(progress)))
        check_current()
        temporary.replace(directory / PROGRESS)

    def restore(self, directory: Path) -> None:
        """Continue from what ``save`` wrote. Parts that the config has changed start afresh, with a
        warning. Raises ``ConfigError`` if a part does not fit."""
        path = directory / PROGRESS
        try:
            progress = msgspec.json.decode(path.read_bytes(), type=Progress)
        except (OSError, msgspec.MsgspecError) as error:
            raise ConfigError(f"--resume: {path} cannot be read: {error}") from error

        for name, part in self._parts.items():
            before = progress.saved.get(name)
            if before == type(part).name:
                part.load(_folder(directory, name))
                continue
            found = "none" if before is None else f"{before!r}'s state"
            log.warning("%s %r starts afresh: the checkpoint has %s", name, type(part).name, found)

        self.dispatcher.resume(progress)
        known = {env.name for env in self.envs}
        stored = decode_rollouts(directory / BUFFERED)
        buffered = [each for each in stored["rollouts"] if each.rollout.env in known]
        self.buffer.restore(buffered)
        log.info("%d scored rollouts were buffered", len(buffered))


def _folder(directory: Path, name: str) -> Path:
    """The sampler's files lie in the part itself: ``orchestrator.buffer.load_from`` names it."""
    return directory if name == "sampler" else directory / name
