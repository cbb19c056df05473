"""Processes: children that end with their parent and start quickly."""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from prime_rl.rundir.launch import PARENT_PID

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
MOST_FILES = 1 << 16


def exit_with_parent() -> None:
    """Make the kernel end this process when its parent dies, however the parent dies.

    Linux only (``prctl``); elsewhere only the supervisor's clean-up ends children. Call it first
    in a child. It also raises the limit of open files.
    """
    raise_file_limit()

    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)

    expected = os.environ.get(PARENT_PID)
    if expected and os.getppid() != int(expected):  # the parent died before the call above
        sys.exit(128 + signal.SIGTERM)


def hide_from_others() -> None:
    """Let no other process of this user read our memory and environment, or trace us: the programs
    of rollouts are such processes, and we have the user's keys. Linux only.

    What we start is not hidden. The kernel shows less of us to the supervisor too: our command
    line and state, but not what we read and write.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def raise_file_limit() -> None:
    """Allow as many open files as this user may have: each rollout in flight takes some."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


@contextmanager
def lasting_imports() -> Iterator[None]:
    """Disable the garbage collector around slow imports, and freeze what they create: modules live
    as long as the process, and traversing those of torch and transformers takes a third of the CPU
    time that the trainer needs to start and end. From then on it runs seldom: a rollout in flight
    makes hundreds of objects that live long, and each collection traverses those of all rollouts.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if collects:
            gc.enable()
            gc.set_threshold(100_000, 20, 50)
