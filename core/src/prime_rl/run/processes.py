"""Processes: children that never outlive their parent, and that are quick to start."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

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


@contextmanager
def lasting_imports() -> Iterator[None]:
    """Around imports that take seconds: the garbage collector rests, and passes over what they made
    for good.

    Modules live as long as the process. Walking them (half a million objects with torch and
    transformers) while they come, in every full collection after and once more at exit takes a
    third of the CPU time that the trainer needs to start and end.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if collects:
            gc.enable()
