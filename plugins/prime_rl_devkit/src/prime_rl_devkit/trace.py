"""``PRIME_RL_TRACE=1``: every hook call on stderr, with process id, scope, plugin and duration.

    [hook 4242] score_group 'reverse-text' my_algo 0.183 ms
    [hook 4242] score_group 'reverse-text' clip 0.342 ms (wraps)

A line is printed when the call ends, so wrapped calls come before their wrapper, and its time
includes theirs. Core reads the variable when a plugin registers (entry-point group
``prime_rl.tracers``): unset, it costs nothing.
"""

from __future__ import annotations

import inspect
import os
import sys
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import pluggy


def trace_calls(manager: pluggy.PluginManager, plugin: str, scope: str) -> None:
    """Replace each hook function of a registered plugin by one that prints."""
    for caller in manager.get_hookcallers(manager.get_plugin(plugin)) or []:
        for impl in caller.get_hookimpls():
            if impl.plugin_name == plugin:
                line = partial(_print, caller.name, scope, plugin, impl.wrapper)
                # pluggy cannot replace a function, but all callers look it up on every call.
                impl.function = _traced(impl.function, line)  # type: ignore[misc]


def _traced(function: Callable[..., Any], line: Callable[[float, str], None]) -> Callable[..., Any]:
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
def _timed(line: Callable[[float, str], None]) -> Iterator[None]:
    start = time.perf_counter()
    outcome = ""
    try:
        yield
    except BaseException as error:
        outcome = f" raised {type(error).__name__}"
        raise
    finally:
        line(time.perf_counter() - start, outcome)


def _print(
    hook: str, scope: str, plugin: str, is_wrapper: bool, seconds: float, outcome: str
) -> None:
    where = f" {scope!r}" if scope else ""
    who = plugin.removeprefix(f"{scope}:") if scope else plugin
    kind = " (wraps)" if is_wrapper else ""
    print(
        f"[hook {os.getpid()}] {hook}{where} {who} {seconds * 1e3:.3f} ms{kind}{outcome}",
        file=sys.stderr,
        flush=True,
    )
