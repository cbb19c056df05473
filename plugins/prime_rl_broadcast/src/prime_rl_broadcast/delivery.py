"""The orchestrator's part: it opens a group for each version and sends the engines to it.

    open the group, send every engine to it -> all have the version
    an engine fails before the broadcast -> abort -> the trainer writes files, and engines load them
    an engine fails after it -> the others have the version; it gets files when it joins again

Members of the last broadcast stay connected. A new process group is made only when an engine has
joined, left or failed.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import shutil
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from prime_rl import (
    EngineError,
    EngineGone,
    ReceivingEngine,
    WeightDelivery,
    Weights,
    WeightsError,
)
from prime_rl.plugins.weight_transports import AnyEngine, Update
from prime_rl.proxies import LOCAL
from prime_rl.weights.versions import FILES_WANTED, wait_for_files
from prime_rl_broadcast.group import FOLDER, Backend, BroadcastGroup

log = logging.getLogger(__name__)


class BroadcastDelivery(WeightDelivery):
    """Delivers the versions of a run, one broadcast at a time."""

    def __init__(self, broadcasts: Path, backend: Backend, timeout: float) -> None:
        """``broadcasts``: the folder of the run's versions. Removes the files of an earlier
        attempt."""
        self._folder = broadcasts / FOLDER
        self._backend = backend
        self.timeout = timeout
        self._open: BroadcastGroup | None = None
        """The group of the broadcast in progress."""
        self._group: Path | None = None
        """Folder of the process group; ``_members`` are the sessions of its engines."""
        self._members: list[object] = []
        shutil.rmtree(self._folder, ignore_errors=True)
        (broadcasts / FILES_WANTED).unlink(missing_ok=True)

    def check(self, engine: ReceivingEngine) -> None:
        receives = engine.receives
        if receives is None or self._backend not in receives.backends:
            backends = "nothing" if receives is None else ", ".join(receives.backends)
            raise EngineError(
                f"engine {engine.url} cannot receive weights by {self._backend}: its GET /health "
                f"lists {backends} under receives. Set weight_broadcast.type = 'filesystem'."
            )
        if self._backend == "ipc" and urlsplit(engine.url).hostname not in LOCAL:
            raise EngineError(
                f"engine {engine.url} is not known to be on the trainer's machine, whose memory "
                "the weight transport 'ipc' shares. Set weight_broadcast.type = 'filesystem', "
                "'gloo' or 'nccl'."
            )

    async def deliver(
        self, weights: Weights, engines: Sequence[AnyEngine], update: Update[AnyEngine]
    ) -> tuple[list[AnyEngine], dict[AnyEngine, BaseException]]:
        """Broadcast one version. Returns the engines that need files, and those that failed.

        As soon as one engine has the version, the trainer continues and writes no files before
        its step ends: failed engines get files when they join again.
        """
        missed = self._unable(engines)
        able = [engine for engine in engines if engine not in missed]
        groups = self._open_group(weights, able) if able else {}
        tasks = {
            engine: asyncio.create_task(update(engine, weights, msgspec.to_builtins(group)))
            for engine, group in groups.items()
        }
        try:
            if tasks:
                await self._all_done(list(tasks.values()))
        finally:
            self._end()

        failures = {r: e for r, task in tasks.items() if (e := _failure(r.url, task)) is not None}
        if len(failures) < len(tasks):
            return [], missed | failures
        gone = {r: e for r, e in failures.items() if isinstance(e, EngineGone)}
        left = [engine for engine in able if engine not in gone]
        if left:
            log.info("waiting for the trainer to write version %d as files", weights.version)
            await wait_for_files(lambda: weights)

        return left, missed | gone

    def _unable(self, engines: Sequence[AnyEngine]) -> dict[AnyEngine, BaseException]:
        """Engines that cannot receive any more, with the reason."""
        failures: dict[AnyEngine, BaseException] = {}
        for engine in engines:
            try:
                self.check(engine)
            except EngineError as error:
                failures[engine] = error
        return failures

    async def _all_done(self, tasks: Sequence[asyncio.Task[None]]) -> None:
        """Wait for all; abort when one fails."""
        try:
            done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            failures = [str(e) for task in done if (e := task.exception()) is not None]
            if failures:
                log.warning("a broadcast of weights is aborted: %s", failures[0])
                self._abort(failures[0])
            if pending:
                _, hung = await asyncio.wait(pending, timeout=self.timeout)
                await _cancel(hung)
        except asyncio.CancelledError:
            self._abort("the run ends")
            await _cancel(tasks)
            raise

    def _open_group(
        self, weights: Weights, engines: Sequence[AnyEngine]
    ) -> dict[AnyEngine, BroadcastGroup]:
        """The group from each engine's point of view. Empty if the trainer has declined."""
        workers = [engine.receives.workers for engine in engines if engine.receives]
        directory = self._folder / secrets.token_hex(4)
        directory.mkdir(parents=True)
        group = self._open = BroadcastGroup(
            directory=str(directory),
            group=str(self._group_of(engines)),
            backend=self._backend,
            rank=0,
            world_size=1 + sum(workers),
            timeout=self.timeout,
            loopback=all(urlsplit(engine.url).hostname in LOCAL for engine in engines),
        )
        if not group.open(weights.directory):
            self._end()
            return {}

        return {
            engine: group.for_worker(1 + sum(workers[:number]))
            for number, engine in enumerate(engines)
        }

    def _abort(self, reason: str) -> None:
        """Release the members that wait, and drop the process group."""
        self._members = []
        if self._open is not None:
            with suppress(WeightsError):  # a full disk: they wait until their timeout
                self._open.abort(reason)

    def _end(self) -> None:
        """Remove the broadcast's folder, unless it was aborted: members may still read why."""
        if self._open is not None and self._members:
            shutil.rmtree(self._open.directory, ignore_errors=True)
        self._open = None

    def _group_of(self, engines: Sequence[ReceivingEngine]) -> Path:
        """Folder of the process group: the last one if its members are the same processes."""
        members: list[object] = [engine.session for engine in engines]
        if self._group is None or members != self._members:
            if self._group is not None:
                shutil.rmtree(self._group, ignore_errors=True)
            self._group = self._folder / f"group_{secrets.token_hex(4)}"
            self._group.mkdir(parents=True)
            self._members = members
        return self._group


def _failure(url: str, task: asyncio.Task[None]) -> BaseException | None:
    if task.cancelled():
        return EngineGone(f"engine {url} still hangs in a broadcast that has ended")
    return task.exception()


async def _cancel(tasks: Collection[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
