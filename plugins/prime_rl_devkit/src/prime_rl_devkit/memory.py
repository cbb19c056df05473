"""What ``plugins list`` found last, in the user's cache folder.

Importing every plugin takes most of a second. The rows hold while nothing has changed that they
were read from: the entry points with their distributions' metadata, each file that was imported,
each folder of those files and of the import path (a package that comes or goes changes its folder),
the interpreter, the environment variables of Python and prime-rl, and those that were read
meanwhile, as digests. Rows with a broken plugin are not kept, because it may work at the next call,
nor those of a plugin that warns.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from prime_rl.entries import entries
from prime_rl.registry.manager import GROUPS

Rows = list[dict[str, Any]]
OF_SHELLS = frozenset({"_", "PWD", "OLDPWD", "SHLVL", "COLUMNS", "LINES"})
"""Variables that differ from one call to the next; what copies the environment reads them too."""


def remembered(find: Callable[[], Rows]) -> Rows:
    """The rows of the last call, else those that ``find`` gives now."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    key = _key()
    file = base / "prime-rl" / "plugins" / f"{_digest(sys.prefix)[:16]}.json"
    with suppress(OSError, ValueError, KeyError, TypeError):  # none yet, or of another version
        kept = json.loads(file.read_text())
        same = all(_state(path) == state for path, state in kept["paths"].items())
        if kept["key"] == key and same and kept["read"] == _values(kept["read"]):
            return list(kept["rows"])

    started = time.time_ns()
    read = set[str]()
    with warnings.catch_warnings(record=True) as said, _variables_read(read):
        rows = find()
    for each in said:
        warnings.showwarning(each.message, each.category, each.filename, each.lineno)
    states = {path: _state(path) for path in _paths()}
    # A path that changed meanwhile: the rows may be of before.
    settled = all(state[0] < started for state in states.values())
    if settled and not said and not any(row["error"] for row in rows):
        with suppress(OSError):  # no such place: import again the next time
            file.parent.mkdir(parents=True, exist_ok=True)
            written = file.with_suffix(f".{os.getpid()}")
            kept = {"key": key, "paths": states, "read": _values(read), "rows": rows}
            written.write_text(json.dumps(kept))
            written.replace(file)

    return rows


def _key() -> str:
    """A digest of the interpreter, the import path, the environment and the plugins' metadata."""
    named = {k: v for k, v in os.environ.items() if k.startswith(("PRIME_RL_", "PYTHON"))}
    dists = [
        (each.name, each.value, group, each.dist and each.dist.read_text("METADATA"))
        for group in GROUPS
        for each in entries(group)
    ]
    return _digest(repr((sys.version, sys.path, sorted(named.items()), dists)))


@contextmanager
def _variables_read(names: set[str]) -> Iterator[None]:
    """Collect the environment variables that are read meanwhile, set or not."""
    kind: Any = type(os.environ)
    read = kind.__getitem__

    def noted(environ: Any, name: str) -> str:
        names.add(name)
        value: str = read(environ, name)
        return value

    kind.__getitem__ = noted
    try:
        yield
    finally:
        kind.__getitem__ = read


def _values(names: Iterable[str]) -> dict[str, str | None]:
    """By variable, a digest of its value, which may be a secret; None: it is not set."""
    return {
        n: None if (v := os.environ.get(n)) is None else _digest(v)
        for n in sorted({*names} - OF_SHELLS)
    }


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _paths() -> set[str]:
    """Every imported file, their folders, and those of the import path."""
    files = {file for module in [*sys.modules.values()] if (file := _file(module))}
    return files | {os.path.dirname(file) for file in files} | {*sys.path}


def _file(module: object) -> str | None:
    file = getattr(module, "__file__", None)
    return file if isinstance(file, str) else None


def _state(path: str) -> list[int]:
    """Time of the last change in nanoseconds, and size in bytes; zeros if there is no such path."""
    try:
        found = os.stat(path)
    except OSError:
        return [0, 0]
    return [found.st_mtime_ns, found.st_size]
