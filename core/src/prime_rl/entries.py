"""The one way to what is installed: every entry point that core or a plugin reads comes from here,
so that ``--without`` and ``plugins.disabled`` leave out all of a plugin's code."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

DISABLE = "PRIME_RL_DISABLE"
"""Environment variable: names of plugins or distributions that no command loads, after commas. A
run's processes get it together with the names of ``plugins.disabled``."""

_left_out: ContextVar[frozenset[str]] = ContextVar("left_out", default=frozenset())


def disabled() -> frozenset[str]:
    """Names of plugins and distributions that are not loaded here."""
    names = (name.strip() for name in os.environ.get(DISABLE, "").split(","))
    return _left_out.get() | frozenset(name for name in names if name)


@contextmanager
def leaving_out(names: Iterable[str]) -> Iterator[None]:
    """The code inside loads none of these either: a config's ``plugins.disabled``."""
    token = _left_out.set(_left_out.get() | frozenset(names))
    try:
        yield
    finally:
        _left_out.reset(token)


def entries(group: str, name: str | None = None) -> list[EntryPoint]:
    """The entry points of a group, in name order, and of a name if one is given, except those of
    plugins that are ``disabled``."""
    names = disabled()
    return [
        entry
        for entry in installed_entries(group)
        if name in (None, entry.name) and not (names and names & names_of(entry))
    ]


def installed_entries(group: str) -> list[EntryPoint]:
    """Entry points of a group, in name order, also of disabled plugins: to name them, not to load
    them."""
    return list(_installed(group, _folders()))


def installed_groups(prefix: str) -> list[str]:
    """The groups of entry points whose name begins so."""
    return sorted(group for group in _scan(_folders()).groups if group.startswith(prefix))


@lru_cache(maxsize=256)
def _installed(group: str, folders: tuple[object, ...]) -> tuple[EntryPoint, ...]:
    """One check of a config asks for fifteen groups, and a scan reads the metadata of some two
    hundred distributions: 7 ms."""
    chosen = _scan(folders).select(group=group)
    return tuple(sorted(chosen, key=lambda entry: entry.name))


@lru_cache(maxsize=1)
def _scan(folders: tuple[object, ...]) -> Any:
    """What is installed in ``folders``: ``SelectableGroups`` in Python 3.11, ``EntryPoints`` since
    3.12."""
    return entry_points()


def _folders() -> tuple[object, ...]:
    """The folders of ``sys.path``. The modification time of a folder changes when a distribution is
    installed or removed there."""
    folders = []
    for path in sys.path:
        try:
            status = os.stat(path or ".")
        except OSError:
            continue

        folders.append((path, status.st_ino, status.st_mtime_ns))

    return tuple(folders)


def names_of(entry: EntryPoint) -> set[str]:
    """What ``plugins.disabled`` may call a plugin: its entry point, or its distribution."""
    return {entry.name} if entry.dist is None else {entry.name, entry.dist.name}
