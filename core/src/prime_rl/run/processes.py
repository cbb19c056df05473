"""Children that never outlive their parent."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

from prime_rl.run.launch import PARENT_PID

_PR_SET_PDEATHSIG = 1


def exit_with_parent() -> None:
    """Make the kernel end this process when its parent dies, however the parent dies.

    Linux only (``prctl``); elsewhere the supervisor's own clean-up has to do. Call it first thing
    in a child.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    expected = os.environ.get(PARENT_PID)
    if expected and os.getppid() != int(expected):  # it died before the call above
        sys.exit(0)
