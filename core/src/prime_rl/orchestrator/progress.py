"""The orchestrator's part of a checkpoint, and going on from it.

Written when batch N has been cut and before it leaves for the trainer, or, where the run is stopped
after it, before the trainer hears of that; at an instant at which no group is half taken in. Then
each group asked for so far is in exactly one place: decided on, for a batch up to N; scored and
buffered (saved as it is, with its credit); or on its way (asked for again, under its own number, so
that its seeds are the same). So a resumed run asks for the examples that the first one would have:
none skipped, none twice.

    orchestrator/sampler files           Sampler.save
    orchestrator/sources/ENV/            Source.save
    orchestrator/algorithms/ENV/         Algorithm.save
    orchestrator/buffered.msgpack        scored rollouts that no batch up to N has taken
    orchestrator/progress.json           last: this part is whole
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from prime_rl.errors import ConfigError
from prime_rl.orchestrator.buffer import Batch, Buffer
from prime_rl.orchestrator.context import RunContext, TrainEnv
from prime_rl.orchestrator.dispatcher import Asked, AskedGroup, Dispatcher
from prime_rl.orchestrator.observers import Observer
from prime_rl.orchestrator.sources import ExternalSource
from prime_rl.orchestrator.store import read_rollouts, write_rollouts
from prime_rl.plugins.base import Offer
from prime_rl.plugins.manager import installed_versions
from prime_rl.plugins.sampler import Sampler
from prime_rl.rundir.checkpoints import PROGRESS, unfinished

log = logging.getLogger(__name__)

BUFFERED = "buffered.msgpack"

RETRY_SECONDS = 5.0
"""Before the second and last attempt at a checkpoint that the disk refused."""


class Waiting(msgspec.Struct):
    """A group that is to be asked for again."""

    group_id: int
    env: str
    example: int


class Progress(msgspec.Struct, kw_only=True):
    """``progress.json``"""

    step: int
    groups_opened: int
    waiting: list[Waiting]
    yields: dict[str, float]
    """Rollouts that a member of each env was last seen to bring."""
    saved: dict[str, str]
    """What has state here, by folder, and its type: ``sampler``, ``algorithms/math``."""
    plugins: dict[str, str]
    """Version of each installed plugin's distribution."""
    config: dict[str, Any]
    """The resolved config under which it was written."""

    @classmethod
    def read(cls, path: Path) -> Progress:
        """Raises ``ConfigError`` if it is not one."""
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except (OSError, msgspec.MsgspecError) as error:
            raise ConfigError(f"--resume: {path} cannot be read: {error}") from error


class State:
    """Everything of the orchestrator that a checkpoint holds."""

    def __init__(
        self,
        sampler: Sampler,
        envs: Sequence[TrainEnv],
        dispatcher: Dispatcher,
        assembler: Buffer,
    ) -> None:
        self.sampler, self.envs = sampler, envs
        self.dispatcher, self.assembler = dispatcher, assembler

    def save(
        self, directory: Path, step: int, plugins: Mapping[str, str], config: Mapping[str, Any]
    ) -> None:
        """Write the part of step ``step`` anew, its ``progress.json`` last. Raises ``OSError``."""
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        saved = {}
        for name, offer in self._offers().items():
            folder = _folder(directory, name)
            folder.mkdir(parents=True, exist_ok=True)
            offer.save(folder)
            saved[name] = type(offer).name
        buffered = self.assembler.buffered
        dropped = {id(rollout): reason for rollout, reason in buffered if reason is not None}
        write_rollouts(directory / BUFFERED, step, [rollout for rollout, _ in buffered], dropped)
        progress = self._progress(step, saved, plugins, config)
        unfinished = directory / f".{PROGRESS}"
        unfinished.write_bytes(msgspec.json.format(msgspec.json.encode(progress)))
        unfinished.replace(directory / PROGRESS)

    def _progress(
        self,
        step: int,
        saved: dict[str, str],
        plugins: Mapping[str, str],
        config: Mapping[str, Any],
    ) -> Progress:
        asked, names = self.dispatcher.asked, [env.name for env in self.envs]
        return Progress(
            step=step,
            groups_opened=asked.num_opened,
            waiting=[
                Waiting(g.group_id, names[g.env_index], g.example_index) for g in asked.groups
            ],
            yields={names[index]: mean for index, mean in asked.yields.items()},
            saved=saved,
            plugins=dict(plugins),
            config=dict(config),
        )

    def restore(self, directory: Path) -> None:
        """Go on from what ``save`` wrote. What the config has changed starts afresh, and says so.
        Raises ``ConfigError`` if a part does not fit."""
        progress = Progress.read(directory / PROGRESS)
        for name, offer in self._offers().items():
            before = progress.saved.get(name)
            if before == type(offer).name:
                offer.load(_folder(directory, name))
            else:
                log.warning("%s %r starts afresh: %s", name, type(offer).name, _why(before))
        index_of = {env.name: index for index, env in enumerate(self.envs)}
        known = [w for w in progress.waiting if w.env in index_of]
        if gone := len(progress.waiting) - len(known):
            log.warning("%d groups that were on their way are of envs that are gone", gone)
        groups = [
            AskedGroup(w.group_id, i, w.example, self.envs[i].group_size)
            for w in known
            for i in (index_of[w.env],)
        ]
        yields = {index_of[env]: x for env, x in progress.yields.items() if env in index_of}
        self.dispatcher.resume(Asked(progress.groups_opened, groups, yields))
        self._restore_buffered(directory / BUFFERED, set(index_of))

    def _restore_buffered(self, path: Path, envs: set[str]) -> None:
        _, rollouts, reasons = read_rollouts(path)
        pairs = zip(rollouts, reasons, strict=True)
        buffered = [(rollout, reason) for rollout, reason in pairs if rollout.env in envs]
        for rollout, _ in buffered:
            rollout.freeze()
        self.assembler.restore(buffered)
        log.info("%d scored rollouts were buffered", len(buffered))

    def _offers(self) -> dict[str, Any]:
        """What may have state, by where it lies."""
        offers: dict[str, Offer] = {"sampler": self.sampler}
        for env in self.envs:
            offers[f"algorithms/{env.name}"] = env.algorithm
            if isinstance(env.source, ExternalSource):
                offers[f"sources/{env.name}"] = env.source.source
        return offers


class Checkpointing(Observer):
    """Writes the orchestrator's part of each checkpoint that is due: before its batch leaves, so
    that the trainer, which completes the checkpoint, finds it."""

    def __init__(self, run: RunContext, state: State) -> None:
        self.context, self.state = run, state

    async def batch_taken(self, batch: Batch) -> None:
        """Write the part if the checkpoint of this step is due."""
        started = time.perf_counter()
        if self.context.config.ckpt.is_due(batch.step, self.context.config.max_steps):
            await self._write(batch.step)
        self.context.waited.add("time/save_ckpt", started)

    async def stopping(self, last: int) -> None:
        """Write the part of the last step, unless it was due anyway."""
        ckpt = self.context.config.ckpt
        if ckpt.is_due(last, last) and not ckpt.is_due(last, self.context.config.max_steps):
            await self._write(last)

    async def _write(self, step: int) -> None:
        part = unfinished(self.context.run_dir, step).orchestrator
        facts = installed_versions(), self.context.config.model_dump(mode="json")
        for wait in (RETRY_SECONDS, None):
            try:
                return self.state.save(part, step, *facts)
            except OSError as error:
                shutil.rmtree(part, ignore_errors=True)
                log.error("cannot write the checkpoint of step %d to %s: %s", step, part, error)
                if wait is not None:
                    self.context.status.report("waiting", waiting_for=f"disk ({error})")
                    await asyncio.sleep(wait)
        log.error("step %d: no checkpoint; the run goes on", step)


def _folder(directory: Path, name: str) -> Path:
    """The sampler's files lie in the part itself: ``orchestrator.buffer.load_from`` names it."""
    return directory if name == "sampler" else directory / name


def _why(before: str | None) -> str:
    return "the checkpoint has none" if before is None else f"the checkpoint has {before!r}'s state"
