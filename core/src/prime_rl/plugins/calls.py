"""Calls of plugins' code: which of them run now, and which one an error comes from."""

from __future__ import annotations

import asyncio
import sys
import sysconfig
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from prime_rl.errors import PrimeRLError
from prime_rl.plugins.hookspecs import PROJECT, TRAINER_GROUP

CORE = str(Path(__file__).parents[1])
STDLIB = sysconfig.get_path("stdlib")


def _task() -> object:
    with suppress(RuntimeError):  # the trainer has no event loop
        return asyncio.current_task()
    return None


@dataclass(eq=False)
class Call:
    """One call of a hook, a wrapper or a loss."""

    plugin: str
    """Name of the algorithm, filter or loss, else of the entry point."""
    hook: str
    owner: object
    """The module or object that has the code."""
    arguments: Mapping[str, Any]
    task: object = field(default_factory=_task)
    """The asyncio task that calls; None: no task."""
    started: float = field(default_factory=time.monotonic)

    @property
    def source(self) -> str:
        """The plugin and its distribution."""
        module = getattr(self.owner, "__name__", "") or type(self.owner).__module__
        entry = _entry_of(module)
        dist = entry.dist if entry else None
        version = f" ({dist.name} {dist.version})" if dist else ""
        return f"plugin {self.plugin!r}{version}"

    def __str__(self) -> str:
        return ", ".join(filter(None, (self.source, self.hook, self.place)))

    @property
    def place(self) -> str:
        """Env and group, or step, of the arguments."""
        for name, value in self.arguments.items():
            while isinstance(value, list | tuple) and value:
                value = value[0]
            if hasattr(value, "group_id"):
                group = f", group {value.group_id}" if name != "groups" else ""
                return f"env {value.env!r}{group}"
            if name in ("step", "version"):
                return f"{name} {value}"
        return ""


RUNNING: dict[int, Call] = {}
"""Calls that have not returned, by ``id()``; an outer one comes before those inside it."""


def _entry_of(module: str) -> EntryPoint | None:
    """The entry point of the plugin that has a module; None for core's own."""
    top = module.partition(".")[0]
    entries = (e for group in (PROJECT, TRAINER_GROUP) for e in entry_points(group=group))
    found = (e for e in entries if e.module.partition(".")[0] == top != "prime_rl")
    return next(found, None)


def blame(error: BaseException, call: Call) -> None:
    """Remember the innermost call that an error comes from."""
    if not hasattr(error, "prime_rl_call"):
        error.prime_rl_call = call  # type: ignore[attr-defined]


def fault(error: BaseException) -> str | None:
    """An error of a plugin: one line with plugin, hook, env and group, and below it the frames
    outside of core. None if no plugin's code was called."""
    frames = [*traceback.walk_tb(error.__traceback__)]
    call: Call | None = getattr(error, "prime_rl_call", None)
    for frame, _ in () if call else frames:  # a sampler, an observer: found by their modules
        if entry := _entry_of(name := str(frame.f_globals.get("__name__", ""))):
            call = Call(entry.name, frame.f_code.co_qualname, sys.modules.get(name), {})
            break
    if call is None:
        return None
    if isinstance(error, PrimeRLError):  # many name the env themselves
        place = "" if str(error).startswith("env ") or not call.place else f", {call.place}"
        return f"{call.source}, {call.hook}{place}: {error}"
    own = [
        summary
        for summary in traceback.extract_tb(error.__traceback__)
        if not summary.filename.startswith(CORE) and "pluggy" not in Path(summary.filename).parts
        if "site-packages" in summary.filename or not summary.filename.startswith(STDLIB)
    ]
    lines = "".join(traceback.format_list(own)).rstrip()
    return f"{call}: {type(error).__name__}: {error}\n{lines}".rstrip()
