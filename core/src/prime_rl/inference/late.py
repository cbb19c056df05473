"""When several engines do the same thing and one of them is late."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

LATE_SECONDS = 30.0
"""What takes less is not late, however quick the others were."""

LATE_FACTOR = 10.0
"""Times what the slowest of the others took. They are alike and read the same files; a cold disk
or a slow network costs one of them several times, not ten times, what it costs the next."""


async def all_but_the_late(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Until all are done, or some are and the rest is late; those go on. What fails sets no pace:
    while none has done it, only their own timeouts apply. Cancelled, cancels them all."""
    started, pace, pending = time.monotonic(), None, set(tasks)
    try:
        while pending:
            left = None
            if pace is not None:
                left = started + max(LATE_SECONDS, LATE_FACTOR * pace) - time.monotonic()
                if left <= 0:
                    return
            done, pending = await asyncio.wait(
                pending, timeout=left, return_when=asyncio.FIRST_COMPLETED
            )
            if any(not task.cancelled() and task.exception() is None for task in done):
                pace = time.monotonic() - started
    except BaseException:
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        raise
