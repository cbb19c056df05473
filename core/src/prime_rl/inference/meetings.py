"""New weights from the trainer's memory: which engines take them together, and where they meet.

    invite the trainer, send every engine there -> all have the version
    one fails -> the meeting is called off -> the trainer writes files, and engines load those
    one fails that was there -> the others have the version; it gets files when it joins again

Whoever took part in the last meeting stays connected: the process group is made anew only when
somebody has come, gone or failed.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import shutil
import time
from collections.abc import Callable, Collection, Coroutine, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from prime_rl.broadcast.meeting import (
    FILES_WANTED,
    MEETINGS,
    STABLE,
    Backend,
    Meeting,
    call_off,
    from_memory,
    has_files,
    invite,
)
from prime_rl.inference.client import EngineGone, Weights
from prime_rl.inference.replica import Replica
from prime_rl.plugins.errors import EngineError
from prime_rl.run.addresses import LOCAL
from prime_rl.wire.transport import DISK_WAITS

log = logging.getLogger(__name__)

POLL_SECONDS = 0.02


class Meetings:
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

    def check(self, replica: Replica) -> None:
        """Raises ``EngineError`` for an engine that cannot take part."""
        receives = replica.admin.receives
        if receives is None or self._backend not in receives.backends:
            found = "nothing" if receives is None else ", ".join(receives.backends)
            raise EngineError(
                f"engine {replica.url} cannot receive weights by {self._backend}: its GET /health "
                f"lists {found} under receives. Set weight_broadcast.type = 'filesystem'."
            )

    def applies(self, weights: Weights) -> bool:
        """Whether the trainer waits to pass a version on; one that is there as files is read."""
        return from_memory(weights.directory) and not has_files(weights.directory)

    async def hold(
        self,
        weights: Weights,
        replicas: Sequence[Replica],
        update: Callable[[Replica, Weights, Meeting], Coroutine[Any, Any, None]],
    ) -> tuple[list[Replica], dict[Replica, BaseException]]:
        """Have the trainer pass a version on to ``replicas``. Those for which it is there as files
        now, and why others have not got it.

        Where one has got it, the trainer goes on, and writes no files before its step is over: what
        the others need, they get when they join again. Raises ``EngineError`` if nobody has got it,
        and the trainer has gone on to the next version.
        """
        missed = self._unable(replicas)
        able = [replica for replica in replicas if replica not in missed]
        places = await self._arranged(weights, able) if able else {}
        tasks = {r: asyncio.create_task(update(r, weights, place)) for r, place in places.items()}
        try:
            if tasks:
                await self._all_done(list(tasks.values()))
        finally:
            self._end()
        failures = {r: e for r, task in tasks.items() if (e := _failure(r, task)) is not None}
        if len(failures) < len(tasks):
            return [], missed | failures
        gone = {r: e for r, e in failures.items() if isinstance(e, EngineGone)}
        left = [replica for replica in able if replica not in gone]
        if left:
            log.info("waiting for the trainer to write version %d as files", weights.version)
            await self.files(lambda: weights)
        return left, missed | gone

    def _unable(self, replicas: Sequence[Replica]) -> dict[Replica, BaseException]:
        """Those that cannot take part, though they could when they joined."""
        found: dict[Replica, BaseException] = {}
        for replica in replicas:
            try:
                self.check(replica)
            except EngineError as error:
                found[replica] = error
        return found

    async def _arranged(
        self, weights: Weights, replicas: Sequence[Replica]
    ) -> dict[Replica, Meeting]:
        """As ``_arrange``, once the disk takes it."""
        for wait in DISK_WAITS:
            try:
                return self._arrange(weights, replicas)
            except OSError as error:
                log.error("cannot invite the trainer to a broadcast: %s", error)
                await asyncio.sleep(wait)
        return self._arrange(weights, replicas)

    async def _all_done(self, tasks: Sequence[asyncio.Task[None]]) -> None:
        """Where one fails the others have nobody to wait for."""
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

    def _arrange(self, weights: Weights, replicas: Sequence[Replica]) -> dict[Replica, Meeting]:
        """Invite the trainer; where each engine has to go. Nothing if it waits no more. Raises
        ``OSError``."""
        workers = [r.admin.receives.workers for r in replicas if r.admin.receives]
        group = self._group_of(replicas)
        self._meeting = self._folder / secrets.token_hex(4)
        self._meeting.mkdir(parents=True)
        invitation = Meeting(
            directory=str(self._meeting),
            group=str(group),
            backend=self._backend,
            rank=0,
            world_size=1 + sum(workers),
            timeout=self.timeout,
            loopback=all(urlsplit(r.url).hostname in LOCAL for r in replicas),
        )
        if not invite(weights.directory, invitation):
            self._end()
            return {}
        return {
            replica: invitation.attended_by(1 + sum(workers[:number]))
            for number, replica in enumerate(replicas)
        }

    def _call_off(self, reason: str) -> None:
        """Somebody has failed: nobody waits for it any more, and the group is done with."""
        self._members = []
        if self._meeting is not None:
            with suppress(OSError):  # a full disk: they wait as long as they may
                call_off(self._meeting, reason)

    def _end(self) -> None:
        """Everybody has left. Why one was called off is still read."""
        if self._meeting is not None and self._members:
            shutil.rmtree(self._meeting, ignore_errors=True)
        self._meeting = None

    async def files(self, wanted: Callable[[], Weights], within: float = math.inf) -> None:
        """Until what is wanted is there as files, for which the trainer is asked: it writes them
        between steps. Raises ``EngineError`` if that takes longer than ``within`` seconds, or the
        next version is announced."""
        deadline = time.monotonic() + within
        while from_memory(wanted().directory) and not has_files(wanted().directory):
            version = wanted().version
            following = self._broadcasts / f"step_{version + 1}"
            if (following / STABLE).exists():
                raise EngineError(f"version {version} was never written: the next is there")
            if not following.exists():
                with suppress(OSError):  # a full disk: at the next look
                    (self._broadcasts / FILES_WANTED).touch()
            if time.monotonic() > deadline:
                raise EngineError(
                    f"the trainer has not written version {version} within {within:g} s; it does "
                    "so between steps"
                )
            await asyncio.sleep(POLL_SECONDS)

    def _group_of(self, replicas: Sequence[Replica]) -> Path:
        """The last one if its members are the same processes."""
        members: list[object] = [replica.lost for replica in replicas]
        if self._group is None or members != self._members:
            if self._group is not None:
                shutil.rmtree(self._group, ignore_errors=True)
            self._group = self._folder / f"group_{secrets.token_hex(4)}"
            self._group.mkdir(parents=True)
            self._members = members
        return self._group


def _failure(replica: Replica, task: asyncio.Task[None]) -> BaseException | None:
    if task.cancelled():
        return EngineGone(
            f"engine {replica.url} does not come back from a broadcast that has ended"
        )
    return task.exception()


async def _cancel(tasks: Collection[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
