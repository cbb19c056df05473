"""Wait for tasks that are alike, but not for the one that takes much longer than the others."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from prime_rl.inference import timing


async def all_but_stragglers(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Return when all are done, or when some have succeeded and the rest are stragglers, which
    continue. A failure sets no pace: while no task has succeeded, only their own timeouts apply.
    Cancelling this cancels the tasks."""
    started, pace, pending = time.monotonic(), None, set(tasks)
    try:
        while pending:
            left = None
            if pace is not None:
                limit = max(timing.STRAGGLER_SECONDS, timing.STRAGGLER_FACTOR * pace)
                left = started + limit - time.monotonic()
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
