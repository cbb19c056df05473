"""Processes: children that end with their parent and start quickly."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from prime_rl.rundir.launch import PARENT_PID

_PR_SET_PDEATHSIG = 1


def exit_with_parent() -> None:
    """Make the kernel end this process when its parent dies, however the parent dies.

    Linux only (``prctl``); elsewhere only the supervisor's clean-up ends children. Call it first
    in a child.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    expected = os.environ.get(PARENT_PID)
    if expected and os.getppid() != int(expected):  # the parent died before the call above
        sys.exit(0)


@contextmanager
def lasting_imports() -> Iterator[None]:
    """Disable the garbage collector around slow imports, and freeze the objects they create.

    Modules live as long as the process. Torch and transformers create half a million objects, and
    traversing them during the imports, in every full collection and at exit takes a third of the
    CPU time that the trainer needs to start and end.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if collects:
            gc.enable()
