"""A time limit for code of a plugin that may hang. A busy machine does not bring it nearer."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

SECONDS = 60.0
"""Until a check that does not return is ended."""


class OwnTime:
    """A clock that stands while this process waits for a CPU: code that computes or sleeps takes
    as long on a busy machine as on an idle one. Where the kernel does not report the wait (no
    ``/proc/self/schedstat``), it is a plain clock."""

    def __init__(self) -> None:
        self._wall = time.perf_counter()
        self._delays = delays()
        self._seconds = 0.0

    def seconds(self) -> float:
        """Since the clock was made."""
        wall = time.perf_counter()
        by_thread = delays()
        # The thread that waited longest: threads that wait for each other all wait at once.
        waited = max(
            (s - self._delays.get(thread, 0.0) for thread, s in by_thread.items()), default=0
        )
        self._seconds += wall - self._wall - waited
        self._wall = wall
        self._delays = by_thread
        return self._seconds


def delays() -> dict[str, float]:
    """Seconds that each thread of this process has waited for a CPU."""
    seconds = {}
    for file in Path("/proc/self/task").glob("*/schedstat"):
        with suppress(OSError):  # the thread has ended
            seconds[file.parent.name] = int(file.read_text("utf-8").split()[1]) / 1e9
    return seconds


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise ``TimeoutError`` in the block after ``seconds`` of ``OwnTime``, and again each time
    they have passed: the block may catch the first and run the next check. Works in the main
    thread of a POSIX process; without effect elsewhere."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGALRM"):
        yield
        return

    clock = OwnTime()
    end = seconds

    def look(number: int, frame: FrameType | None) -> None:
        nonlocal end
        now = clock.seconds()
        if now >= end:
            end = now + seconds
            raise TimeoutError(
                f"it did not return within {seconds:g} s. A hook must not wait for ever; --limit "
                "gives a slow one more time."
            )

    before = signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, seconds / 20, seconds / 20)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
