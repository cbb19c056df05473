"""Warnings about hooks that do not return, and about those that block every rollout."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from functools import partial

from pydantic import PositiveFloat

from prime_rl import Observer, ObserverHost, PluginConfig
from prime_rl.registry.calls import RUNNING, Call

log = logging.getLogger("prime_rl.orchestrator.hooks")

LOOK_SECONDS = 0.25


class HookWatchConfig(PluginConfig):
    """``[observers.hook_watch]``: when a hook of a plugin counts as too slow."""

    waits: PositiveFloat = 30.0
    """Seconds after which a hook that has not returned is named. It may wait for a model."""
    blocks: PositiveFloat = 1.0
    """Seconds after which a hook is named that blocks the event loop: it does not await."""


class HookWatch(Observer):
    """Names a hook that does not return, with its plugin, env and the rollouts that wait for it.

    A thread looks, because code that blocks the event loop stops every task. It warns again each
    time that the duration has doubled.
    """

    name = "hook_watch"
    config_class = HookWatchConfig
    config: HookWatchConfig

    def __init__(self, config: PluginConfig, host: ObserverHost) -> None:
        super().__init__(config, host)
        self._ended = threading.Event()
        self._told: dict[tuple[str, str], float] = {}
        """Seconds of the longest call that was named, by plugin and hook."""

    async def run(self) -> None:
        """Look until cancelled."""
        loop = asyncio.get_running_loop()
        thread = threading.get_ident()
        self._beat = time.monotonic()
        looking = threading.Thread(target=self._look, args=(loop, thread), daemon=True)
        looking.start()
        try:
            await asyncio.Event().wait()
        finally:
            self._ended.set()

    def _look(self, loop: asyncio.AbstractEventLoop, thread: int) -> None:
        while not self._ended.wait(LOOK_SECONDS):
            loop.call_soon_threadsafe(self._answer)
            self.look(time.monotonic(), asyncio.current_task(loop), thread)

    def _answer(self) -> None:
        self._beat = time.monotonic()

    def look(self, now: float, task: object, thread: int) -> None:
        """Name what is too slow. ``task`` runs in the event loop of ``thread`` now."""
        blocked = now - self._beat
        for call in innermost(RUNNING.copy().values()):
            seconds = now - call.started
            if call.task is task and min(blocked, seconds) > self.config.blocks:
                place = _innermost_line(thread)
                self._name(call, min(blocked, seconds), partial(_blocks, place))
            elif seconds > self.config.waits:
                self._name(call, seconds, self._waits)

    def _name(self, call: Call, seconds: float, text: Callable[[float], str]) -> None:
        key = call.plugin, call.hook
        if seconds >= 2 * self._told.get(key, 0.0):
            self._told[key] = seconds
            message = f"{call} {text(seconds)}"
            log.warning("%s", message)
            self.host.shared.run.status.report("scoring", waiting_for=message)

    def _waits(self, seconds: float) -> str:
        return (
            f"has not returned for {seconds:.0f} s; {self.host.num_waiting()} rollouts wait. If it "
            "asks a model, check that this answers; a timeout of its own would end the wait."
        )


def _blocks(place: str, seconds: float) -> str:
    return (
        f"has blocked the event loop for {seconds:.1f} s, at {place}: no rollout moves meanwhile. "
        "Await it, or run it by asyncio.to_thread."
    )


def innermost(calls: Iterable[Call]) -> list[Call]:
    """The last call of each task: a wrapper waits for what it wraps."""
    return [*{id(call.task): call for call in calls}.values()]


def _innermost_line(thread: int) -> str:
    frame = sys._current_frames().get(thread)
    if frame is None:
        return "an unknown line"
    last = traceback.extract_stack(frame)[-1]
    return f"{last.filename}:{last.lineno} ({last.line})"
