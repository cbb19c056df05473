"""Errors of the file system in what is read again and again.

A shared disk refuses a read now and then (NFS: ESTALE, EIO), and the next one succeeds. So a poll
that cannot read has seen nothing. An error that lasts is logged, once.
"""

from __future__ import annotations

import logging
import math
import time
from pathlib import Path

log = logging.getLogger(__name__)

SAY_SECONDS = 30.0
"""For which something cannot be read until the log says so."""

_failing: dict[Path, float] = {}
"""Since when a path cannot be read; infinite: the log has it."""


def poll_failed(path: Path, error: Exception) -> None:
    """A poll could not read ``path``, and looks again."""
    now = time.monotonic()
    since = _failing.setdefault(path, now)
    if now - since >= SAY_SECONDS:
        _failing[path] = math.inf
        log.warning("%s: not readable for %.0f s, still trying: %s", path, now - since, error)


def poll_succeeded(path: Path) -> None:
    """A poll could read ``path``."""
    _failing.pop(path, None)
