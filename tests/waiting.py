"""How tests wait: for a condition, never for time to pass; and the clock they give to code."""

from __future__ import annotations

import asyncio
import json
import selectors
import subprocess
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

LIMIT = 600.0
"""Seconds that nothing here takes, however busy the machine is: for what must come true, and for
the timeouts of what must succeed."""


def eventually(
    condition: Callable[[], Any], process: subprocess.Popen[Any] | None = None, pause: float = 0.02
) -> None:
    """Wait until ``condition()`` holds; fail at once if ``process``, which is to bring it about,
    ends before."""
    deadline = time.monotonic() + LIMIT
    while not condition():
        code = None if process is None else process.poll()
        assert code is None or condition(), f"the process ended with {code} before"
        assert time.monotonic() < deadline, f"not true after {LIMIT:.0f} s"
        time.sleep(pause)


async def until(condition: Callable[[], Any], pause: float = 0.005) -> None:
    """``eventually`` for what happens in this event loop."""
    async with asyncio.timeout(LIMIT):
        while not condition():
            await asyncio.sleep(pause)


def lines_so_far(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a JSONL file, which a process may be writing: the last may be half."""
    whole = path.read_text("utf-8").split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in whole]


class Clock:
    """Stands in for the module ``time`` in code under test: its time passes in ``sleep``, and when
    a test moves ``now``."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    time = perf_counter = monotonic

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def exists(pid: int) -> bool:
    """Whether a process with this id runs; a zombie does not."""
    from prime_rl.rundir.control import start_of

    return start_of(pid) is not None


def skipping(clock: Clock, main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run ``main`` in an event loop that waits for no timer: the clock jumps to the next one. For
    what has neither sockets nor threads, since it would not wait for those either."""
    with asyncio.Runner(loop_factory=lambda: _SkippingLoop(clock)) as runner:
        return runner.run(main())


class _SkippingLoop(asyncio.SelectorEventLoop):
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        super().__init__(_SkippingSelector(clock))

    def time(self) -> float:
        return self._clock.now


class _SkippingSelector(selectors.DefaultSelector):
    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> Any:
        self._clock.now += timeout or 0.0
        return super().select(None if timeout is None else 0)
