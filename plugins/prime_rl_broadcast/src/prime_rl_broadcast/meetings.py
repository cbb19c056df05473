"""New weights from the trainer's memory: which engines take them together, and where they meet.

    invite the trainer, send every engine there -> all have the version
    one fails -> the meeting is called off -> the trainer writes files, and engines load those
    one fails that was there -> the others have the version; it gets files when it joins again

Members of the last broadcast stay connected: the process group is made anew only when an engine
has joined, left or failed.
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

from prime_rl import EngineError, EngineGone, ReceivingEngine, WeightDelivery, Weights
from prime_rl.plugins.weight_transports import AnyEngine, Update
from prime_rl.rundir.launch import LOCAL
from prime_rl.weights.versions import FILES_WANTED, wait_for_files
from prime_rl_broadcast.meeting import MEETINGS, Backend, Meeting, call_off, invite

log = logging.getLogger(__name__)


class Meetings(WeightDelivery):
    """Arranges broadcasts of a run, one at a time."""

    def __init__(self, broadcasts: Path, backend: Backend, timeout: float) -> None:
        """``broadcasts``: the folder of the run's versions. Clears what an earlier attempt left."""
        self._broadcasts, self._folder = broadcasts, broadcasts / MEETINGS
        self._backend, self.timeout = backend, timeout
        self._meeting: Path | None = None
        self._group: Path | None = None
        self._members: list[object] = []
        shutil.rmtree(self._folder, ignore_errors=True)
        (broadcasts / FILES_WANTED).unlink(missing_ok=True)

    def check(self, engine: ReceivingEngine) -> None:
        receives = engine.receives
        if receives is None or self._backend not in receives.backends:
            found = "nothing" if receives is None else ", ".join(receives.backends)
            raise EngineError(
                f"engine {engine.url} cannot receive weights by {self._backend}: its GET /health "
                f"lists {found} under receives. Set weight_broadcast.type = 'filesystem'."
            )

    async def deliver(
        self, weights: Weights, engines: Sequence[AnyEngine], update: Update[AnyEngine]
    ) -> tuple[list[AnyEngine], dict[AnyEngine, BaseException]]:
        """Hold one meeting.

        Where one engine has got the version, the trainer goes on, and writes no files before its
        step is over: the other engines get them when they join again.
        """
        missed = self._unable(engines)
        able = [engine for engine in engines if engine not in missed]
        places = self._arrange(weights, able) if able else {}
        tasks = {
            engine: asyncio.create_task(update(engine, weights, msgspec.to_builtins(place)))
            for engine, place in places.items()
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
        """Those that cannot take part, though they could when they joined."""
        found: dict[AnyEngine, BaseException] = {}
        for engine in engines:
            try:
                self.check(engine)
            except EngineError as error:
                found[engine] = error
        return found

    async def _all_done(self, tasks: Sequence[asyncio.Task[None]]) -> None:
        """When one member fails, release the others."""
        try:
            done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            failures = [str(e) for task in done if (e := task.exception()) is not None]
            if failures:
                log.warning("a broadcast of weights is called off: %s", failures[0])
                self._call_off(failures[0])
            if pending:
                _, hung = await asyncio.wait(pending, timeout=self.timeout)
                await _cancel(hung)
        except asyncio.CancelledError:
            self._call_off("the run ends")
            await _cancel(tasks)
            raise

    def _arrange(self, weights: Weights, engines: Sequence[AnyEngine]) -> dict[AnyEngine, Meeting]:
        """Invite the trainer; the meeting as each engine attends it. Empty if the trainer has
        declined."""
        workers = [engine.receives.workers for engine in engines if engine.receives]
        group = self._group_of(engines)
        self._meeting = self._folder / secrets.token_hex(4)
        self._meeting.mkdir(parents=True)
        invitation = Meeting(
            directory=str(self._meeting),
            group=str(group),
            backend=self._backend,
            rank=0,
            world_size=1 + sum(workers),
            timeout=self.timeout,
            loopback=all(urlsplit(engine.url).hostname in LOCAL for engine in engines),
        )
        if not invite(weights.directory, invitation):
            self._end()
            return {}
        return {
            engine: invitation.attended_by(1 + sum(workers[:number]))
            for number, engine in enumerate(engines)
        }

    def _call_off(self, reason: str) -> None:
        """A member has failed: release the others, and drop the group."""
        self._members = []
        if self._meeting is not None:
            with suppress(OSError):  # a full disk: they wait as long as they may
                call_off(self._meeting, reason)

    def _end(self) -> None:
        """Everybody has left. Why one was called off is still read."""
        if self._meeting is not None and self._members:
            shutil.rmtree(self._meeting, ignore_errors=True)
        self._meeting = None

    def _group_of(self, engines: Sequence[ReceivingEngine]) -> Path:
        """The last one if its members are the same processes."""
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
        return EngineGone(f"engine {url} does not come back from a broadcast that has ended")
    return task.exception()


async def _cancel(tasks: Collection[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
