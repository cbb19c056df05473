"""``PRIME_RL_TRACE=1``: every hook call on stderr, with process id, scope, plugin and duration.

    [hook 4242] score_group 'reverse-text' my_algo 0.183 ms
    [hook 4242] score_group 'reverse-text' clip 0.342 ms (wraps)
    [hook 4242] score_group 'reverse-text' my_algo has not returned for 5 s

A line is printed when the call ends, so wrapped calls come before their wrapper, and its time
includes theirs; and after 5, 10, 20 ... seconds without an end. Core reads the variable when a
plugin registers (entry-point group ``prime_rl.tracers``): unset, it costs nothing.
"""

from __future__ import annotations

import inspect
import os
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial, wraps
from typing import Any

import pluggy


def trace_calls(manager: pluggy.PluginManager, plugin: str, scope: str) -> None:
    """Replace each hook function of a registered plugin by one that prints."""
    for caller in manager.get_hookcallers(manager.get_plugin(plugin)) or []:
        for impl in caller.get_hookimpls():
            if impl.plugin_name == plugin:
                line = partial(_print, _head(caller.name, scope, plugin), impl.wrapper)
                # pluggy cannot replace a function, but all callers look it up on every call.
                impl.function = _traced(impl.function, line)  # type: ignore[misc]


def _traced(
    function: Callable[..., Any], line: Callable[[float | None, str], None]
) -> Callable[..., Any]:
    if inspect.isgeneratorfunction(function):

        @wraps(function)
        def wrapper(*arguments: Any) -> Generator[Any, Any, Any]:
            with _timed(line):
                return (yield from function(*arguments))

        return wrapper

    if inspect.iscoroutinefunction(function):

        @wraps(function)
        async def awaited(*arguments: Any) -> Any:
            with _timed(line):
                return await function(*arguments)

        return awaited

    @wraps(function)
    def plain(*arguments: Any) -> Any:
        with _timed(line):
            return function(*arguments)

    return plain


@contextmanager
def _timed(line: Callable[[float | None, str], None]) -> Iterator[None]:
    start = time.perf_counter()
    outcome = ""
    key = object()
    now = time.monotonic()
    OPEN[id(key)] = OpenCall(line, now, now + FIRST_SECONDS)
    _watch()
    try:
        yield
    except BaseException as error:
        outcome = f" raised {type(error).__name__}"
        raise
    finally:
        del OPEN[id(key)]
        line(time.perf_counter() - start, outcome)


@dataclass
class OpenCall:
    """A call that has not returned."""

    line: Callable[[float | None, str], None]
    started: float
    due: float
    """When to print next that it has not returned."""


OPEN: dict[int, OpenCall] = {}
FIRST_SECONDS = 5.0
LOOK_SECONDS = 0.5


@cache
def _watch() -> None:
    """Start the thread that looks at open calls; it works beside a call that blocks."""

    def look() -> None:
        while True:
            time.sleep(LOOK_SECONDS)
            print_overdue(time.monotonic())

    threading.Thread(target=look, daemon=True).start()


def print_overdue(now: float) -> None:
    """Print the calls that are due."""
    for call in OPEN.copy().values():
        if now >= call.due:
            seconds = now - call.started
            call.due = call.started + 2 * seconds
            call.line(None, f" has not returned for {seconds:.0f} s")


def _head(hook: str, scope: str, plugin: str) -> str:
    where = f" {scope!r}" if scope else ""
    who = plugin.removeprefix(f"{scope}:") if scope else plugin
    return f"[hook {os.getpid()}] {hook}{where} {who}"


def _print(head: str, is_wrapper: bool, seconds: float | None, outcome: str) -> None:
    took = "" if seconds is None else f" {seconds * 1e3:.3f} ms"
    kind = " (wraps)" if is_wrapper else ""
    print(f"{head}{took}{kind}{outcome}", file=sys.stderr, flush=True)
