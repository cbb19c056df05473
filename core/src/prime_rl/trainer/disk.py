"""Writing to a disk that may refuse: said, tried again, and never left half-written.

What writes does so under another name and renames at the end, so trying again starts from nothing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from prime_rl.errors import WeightsError
from prime_rl.rundir.status import Status
from prime_rl.wire.transport import DISK_WAITS

logger = logging.getLogger(__name__)

PUBLISH_WAITS = DISK_WAITS
"""Seconds between attempts to publish: without the weights nobody can go on. Ten minutes."""
CHECKPOINT_WAITS: Sequence[float] = (1, 5, 30)
"""Between attempts at a checkpoint: a run can do without one."""


def persist(
    write: Callable[[], None], doing: str, waits: Sequence[float], status: Status | None = None
) -> None:
    """Call ``write`` until the disk takes it. Raises its last error when there is no wait left.

    ``doing`` completes "cannot ...". ``status`` is told whom everybody waits for.
    """
    for attempt, wait in enumerate(waits, 1):
        try:
            return write()
        except (OSError, WeightsError) as error:
            logger.error(
                "cannot %s (attempt %d of %d, the next in %g s): %s",
                *(doing, attempt, len(waits) + 1, wait, error),
            )
            if status is not None:
                status.report("waiting", waiting_for=f"disk ({error})")
            time.sleep(wait)
    return write()
