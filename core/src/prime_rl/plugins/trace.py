"""``PRIME_RL_TRACE=1``: every hook call on stderr, with its plugin, its scope and what it took.

    [hook 4242] score_group 'reverse-text' my_algo 0.183 ms
    [hook 4242] score_group 'reverse-text' clip 0.342 ms (wraps)

A line is printed when the call is over, so what a wrapper wraps comes before it, and its time is
part of the wrapper's. Decided as a plugin is registered: while the variable is unset, calls are as
they were. In every process, each with its own id.
"""

from __future__ import annotations

import inspect
import os
import sys
import time
from collections.abc import Awaitable, Callable, Generator, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import pluggy

VARIABLE = "PRIME_RL_TRACE"


def wanted() -> bool:
    """Whether this process prints its hook calls."""
    return os.environ.get(VARIABLE, "") not in ("", "0")


def trace_calls(manager: pluggy.PluginManager, plugin: str, scope: str) -> None:
    """Put a printing function in the place of each hook function of one registered plugin."""
    for caller in manager.get_hookcallers(manager.get_plugin(plugin)) or []:
        for impl in caller.get_hookimpls():
            if impl.plugin_name == plugin:
                line = partial(_print, caller.name, scope, plugin, impl.wrapper)
                # pluggy has no way to put a function in another's place; its own callers look it
                # up on every call, as ours do.
                impl.function = _traced(impl.function, line)  # type: ignore[misc]


def _traced(function: Callable[..., Any], line: Callable[[float, str], None]) -> Callable[..., Any]:
    if inspect.isgeneratorfunction(function):

        @wraps(function)
        def wrapper(*arguments: Any) -> Generator[Any, Any, Any]:
            with _timed(line):
                return (yield from function(*arguments))

        return wrapper

    @wraps(function)
    def plain(*arguments: Any) -> Any:
        if inspect.iscoroutinefunction(function):
            return _awaited(function(*arguments), line)
        with _timed(line):
            return function(*arguments)

    return plain


async def _awaited(pending: Awaitable[Any], line: Callable[[float, str], None]) -> Any:
    with _timed(line):
        return await pending


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
