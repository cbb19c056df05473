"""Temporary folders that do not stay if their process is killed: the next one removes them.

Its process holds a lock on the folder, which the kernel releases with the process. Where a folder
cannot be locked (some network disks), none is removed that another process has made.
"""

from __future__ import annotations

import fcntl
import glob
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Self


class Scratch:
    """A new folder in ``parent`` (None: that of the system), until ``remove``, or the end of the
    ``with`` block or the process. Its name begins with ``prefix``, and so do those that a process
    which was killed has left there: they are removed first."""

    def __init__(self, prefix: str, parent: str | Path | None = None) -> None:
        folder = Path(tempfile.gettempdir() if parent is None else parent)
        for left in folder.glob(f"{glob.escape(prefix)}*"):
            _remove_if_left(left)

        self.path, self._lock = _locked(prefix, folder)
        self._is_ours = True

    def remove(self) -> None:
        """Also if it has been renamed, or removed already."""
        if self._is_ours:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._is_ours = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()


def _locked(prefix: str, parent: Path) -> tuple[Path, int]:
    """A new folder, and the descriptor that holds its lock."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        try:
            lock = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:  # another process took it for one that was left
            continue

        is_ours = True
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # the other one is about to remove it
            is_ours = False
        except OSError:
            pass  # no locks here

        # The folder may have been removed before it was locked.
        if is_ours and path.is_dir():
            return path, lock
        os.close(lock)


def _remove_if_left(path: Path) -> None:
    with suppress(OSError):  # another user's; or removed at this moment
        # O_NOFOLLOW: another user may have put a link into a shared folder.
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(lock)
