"""A shared disk that refuses calls now and then, as a client of NFS does."""

from __future__ import annotations

import errno
import io
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

READS = ("listdir", "scandir", "stat", "lstat")
CHANGES = ("open", "unlink", "rmdir", "mkdir", "rename", "replace", "utime")


class SharedDisk:
    """All below ``root``. ``seen`` counts the calls, and ``refused`` those with ESTALE."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
        self._root = f"{root}/"
        self._refuses: Callable[[], bool] = lambda: False
        self.seen = 0
        self.refused = 0
        for name in (*READS, *CHANGES):
            monkeypatch.setattr(os, name, self._asked(getattr(os, name)))
        # What pathlib opens files with.
        monkeypatch.setattr(io, "open", self._asked(io.open))

    def _asked(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def asked(path: Any = ".", *args: Any, **settings: Any) -> Any:
            is_path = isinstance(path, str | os.PathLike)
            if is_path and f"{os.fspath(path)}/".startswith(self._root):
                self.seen += 1
                if self._refuses():
                    self.refused += 1
                    raise OSError(errno.ESTALE, "Stale file handle", os.fspath(path))
            return call(path, *args, **settings)

        return asked

    @contextmanager
    def refusing(self, share: float = 1.0) -> Iterator[Callable[[], None]]:
        """Refuse this share of the calls inside, until what is yielded is called."""
        luck = random.Random(0)  # a fixed period could meet the same call of each look
        self._refuses = lambda: luck.random() < share
        try:
            yield self._answer
        finally:
            self._answer()

    @contextmanager
    def refusing_one(self, number: int) -> Iterator[None]:
        """Refuse one call inside, the first being 0."""
        last = self.seen + number + 1
        self._refuses = lambda: self.seen == last
        try:
            yield
        finally:
            self._answer()

    def _answer(self) -> None:
        self._refuses = lambda: False
