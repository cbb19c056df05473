"""The one way to what is installed: every entry point that core or a plugin reads comes from here,
so that ``--without`` and ``plugins.disabled`` leave out all of a plugin's code."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from prime_rl.errors import PluginError

DISABLE = "PRIME_RL_DISABLE"
"""Environment variable: names of plugins or distributions that no command loads, after commas. A
run's processes get it together with the names of ``plugins.disabled``."""

OF_PLUGINS = ("prime_rl", "prime_rl.trainer", "prime_rl.commands", "prime_rl.known")
"""The groups of entry points that a plugin of anybody may have (``docs/plugins.md``)."""

OF_OURS = (
    *("prime_rl.api", "prime_rl.checks", "prime_rl.env_workers", "prime_rl.fits"),
    *("prime_rl.forks", "prime_rl.machine_defaults", "prime_rl.renamed_tasksets"),
    *("prime_rl.tracers", "prime_rl_app.plugin"),
)
"""The groups that core, the application and packages released with them read, too."""

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


def load_entry(entry: EntryPoint) -> Any:
    """What an entry point names. Raises ``PluginError`` if it names nothing, and what the import
    raises."""
    malformed = fault_of_form(entry)
    if malformed is not None:
        raise PluginError(malformed)
    return entry.load()


def fault_of_form(entry: EntryPoint) -> str | None:
    """Why an entry point can name nothing. None: its form is right."""
    if entry.pattern.match(entry.value) is not None:
        return None
    dist = entry.dist
    package = "its package" if dist is None else dist.name
    version = "" if dist is None else f" ({dist.name} {dist.version})"
    return (
        f"plugin {entry.name!r}{version}: its entry point in the group {entry.group!r} is "
        f"{entry.value!r}, expected a module, or a module and a name in it: my_module:my_name. Fix "
        f"or uninstall {package}, or list {entry.name!r} under plugins.disabled."
    )


@dataclass(frozen=True)
class MisspeltGroup:
    """A group of entry points that looks like one of ours, and that nothing reads."""

    group: str
    entries: tuple[EntryPoint, ...]

    def __str__(self) -> str:
        entry = self.entries[0]
        dist = "" if entry.dist is None else f"{entry.dist.name} {entry.dist.version} "
        return (
            f"{dist}has the entry point {entry.name!r} in the group {self.group!r}, which nothing "
            f"reads; did you mean {group_meant(self.group)!r}?"
        )


def group_meant(group: str) -> str | None:
    """The group of entry points that was meant by one that nothing reads. None: it is read, or of
    another project, as ``prime_rl_mine.extensions`` is."""
    if group in (*OF_PLUGINS, *OF_OURS):
        return None
    name = group.replace("-", "_").lower()
    if not name.startswith("prime_rl"):
        return None
    close = next(iter(difflib.get_close_matches(name, OF_PLUGINS, n=1, cutoff=0.75)), "prime_rl")
    is_in_ours = name == "prime_rl" or name.startswith("prime_rl.")
    is_close = difflib.SequenceMatcher(None, name, close).ratio() > 0.9
    return close if is_in_ours or is_close else None


def misspelt_groups() -> list[MisspeltGroup]:
    """The groups of installed distributions that look like ours and that nothing reads, one for
    each distribution."""
    misspelt = []
    for group in installed_groups(""):
        if group_meant(group) is None:
            continue
        by_distribution: dict[str, list[EntryPoint]] = {}
        for entry in installed_entries(group):
            by_distribution.setdefault(entry.dist.name if entry.dist else "", []).append(entry)
        misspelt += [MisspeltGroup(group, tuple(each)) for each in by_distribution.values()]
    return misspelt


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
