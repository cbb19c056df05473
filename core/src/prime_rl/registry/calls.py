"""Calls of plugins' code: which of them run now, what they log, and which one an error comes from.

``log_metric`` keeps what it gets until the step is reduced.
"""

from __future__ import annotations

import inspect
import math
import re
import sys
import sysconfig
import time
import traceback
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import wraps
from importlib.metadata import EntryPoint
from pathlib import Path
from types import MappingProxyType
from typing import Any, SupportsFloat, TypeAlias

from prime_rl.entries import entries
from prime_rl.errors import PluginError, PrimeRLError
from prime_rl.plugins.hookspecs import PROJECT, TRAINER_GROUP
from prime_rl.plugins.status import Facts

CORE = str(Path(__file__).parents[1])
STDLIB = sysconfig.get_path("stdlib")
INSTALLED = sysconfig.get_path("purelib"), sysconfig.get_path("platlib")


def _task() -> object:
    with suppress(KeyError, RuntimeError):  # the trainer has no event loop
        return sys.modules["asyncio"].current_task()
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
    installed = (e for group in (PROJECT, TRAINER_GROUP) for e in entries(group))
    found = (e for e in installed if e.module.partition(".")[0] == top != "prime_rl")
    return next(found, None)


def blame(error: BaseException, call: Call) -> None:
    """Remember the innermost call that an error comes from."""
    if not hasattr(error, "prime_rl_call"):
        error.prime_rl_call = call  # type: ignore[attr-defined]


def facts_of_failure(error: BaseException) -> Facts:
    """For the status of a process that ends by ``error``."""
    is_plugins = isinstance(error, PluginError) or fault(error) is not None
    return Facts(fault="plugin" if is_plugins else None)


def fault(error: BaseException) -> str | None:
    """An error of a plugin: one line with plugin, hook, env and group, and below it the frames
    of its package, and of code that is not installed. None if no plugin's code was called."""
    frames = [*traceback.walk_tb(error.__traceback__)]
    call: Call | None = getattr(error, "prime_rl_call", None)
    for frame, _ in () if call else frames:  # a sampler, an observer: found by their modules
        entry = _entry_of(name := str(frame.f_globals.get("__name__", "")))
        if entry:
            call = Call(entry.name, frame.f_code.co_qualname, sys.modules.get(name), {})
            break

    if call is None:
        return None
    if isinstance(error, PrimeRLError):  # many name the env themselves
        place = "" if str(error).startswith("env ") or not call.place else f", {call.place}"
        return f"{call.source}, {call.hook}{place}: {error}"

    package = (getattr(call.owner, "__name__", "") or type(call.owner).__module__).split(".")[0]
    found = traceback.extract_tb(error.__traceback__)
    own = [
        summary
        for summary, (frame, _) in zip(found, frames, strict=True)
        if str(frame.f_globals.get("__name__", "")).split(".")[0] == package != "prime_rl"
        or not summary.filename.startswith((CORE, STDLIB, *INSTALLED))
    ]
    lines = "".join(traceback.format_list(own)).rstrip()
    return f"{call}: {type(error).__name__}: {error}\n{lines}".rstrip()


Logged = deque[tuple[str, Any, Any]]
"""Names, values and weights: floats, or 0-dim tensors."""
Function: TypeAlias = Callable[..., Any]

_running: ContextVar[tuple[str, Logged]] = ContextVar("running", default=("", deque()))
"""The plugin whose code runs, and where its values go."""


def log_metric(name: str, value: SupportsFloat, weight: SupportsFloat = 1.0) -> None:
    """Log a value of the metric ``plugin/<plugin>/<name>``: the step reports its mean over all
    calls, sum(value * weight) / sum(weight).

    Call it in a hook, a wrapper, a loss or ``TrainerObserver.row_trained``. <plugin> is the name of
    the algorithm, filter, loss or observer that calls, else the entry-point name of the plugin.

    In the trainer the mean is over all ranks. In the orchestrator a value belongs to the batch that
    is being collected at the time of the call, whichever batch its rollout joins later; in
    ``step_finished`` it belongs to that step. A 0-dim tensor is read when the step is reduced, so
    the call does not wait for the device. If it is not finite, neither is the mean.

    Raises ``PluginError`` for a malformed name or number, and where no plugin is called.
    ``asyncio.to_thread`` keeps the plugin's name; other threads do not have it.
    """
    plugin, logged = _running.get()
    if not plugin:
        raise PluginError(
            f"log_metric({name!r}, ...): no hook, wrapper or loss of a plugin is called here. Log "
            "inside one, in threads by asyncio.to_thread, in tests by testing.logged_metrics()."
        )

    try:
        if not re.fullmatch(r"[\w.@-]+(/[\w.@-]+)*", name, re.ASCII):
            raise ValueError(name)
        logged.append((f"plugin/{plugin}/{name}", _number(value), _number(weight, 0.0)))
    except (TypeError, ValueError, RuntimeError) as error:
        raise PluginError(
            f"plugin {plugin!r}: log_metric{(name, value, weight)}: expected a name of letters, "
            "digits and _.@- between slashes, a finite number or a 0-dim tensor, a weight >= 0"
        ) from error


def _number(number: Any, least: float = -math.inf) -> Any:
    if hasattr(number, "detach") and not number.dim():
        return number.detach().clone()  # the plugin may change its tensor in place
    if not (math.isfinite(number := float(number)) and number >= least):
        raise ValueError(number)
    return number


def take_logged() -> list[tuple[str, Any, Any]]:
    """What was logged since the last call."""
    logged = _running.get()[1]
    return [logged.popleft() for _ in range(len(logged))]


def weighted_means(logged: Iterable[tuple[str, Any, Any]]) -> dict[str, float]:
    """The mean of each metric, unless all its weights are 0. Raises ``PluginError`` if one is
    negative."""
    import numpy as np

    pairs = defaultdict(list)
    means = {}
    for name, value, weight in logged:
        if weight < 0:
            raise PluginError(f"{name}: a weight is {float(weight)}, expected at least 0")
        if weight:
            pairs[name].append((float(value), float(weight)))

    for name, columns in pairs.items():
        values, weights = np.array(columns).T
        with np.errstate(all="ignore"):  # what is not finite stays so, and is seen
            means[name] = float(np.average(values, weights=weights))

    return means


@contextmanager
def running(
    plugin: str,
    logged: Logged | None = None,
    *,
    hook: str = "",
    owner: object = None,
    arguments: Mapping[str, Any] = MappingProxyType({}),
) -> Iterator[None]:
    """The code inside is the plugin's. ``logged`` keeps its values apart from the process's. With
    a ``hook``, the call is in ``RUNNING`` and is to blame for an error."""
    token = _running.set((plugin, _running.get()[1] if logged is None else logged))
    call = Call(plugin, hook, owner, arguments)
    try:
        if hook:
            RUNNING[id(call)] = call
        yield
    except Exception as error:
        if hook:
            blame(error, call)
        raise
    finally:
        RUNNING.pop(id(call), None)
        _running.reset(token)


@contextmanager
def logged_metrics(plugin: str = "test") -> Iterator[dict[str, float]]:
    """What the code inside logs, reduced at its end: ``{"plugin/test/ratio": 1.5}``. A hook or loss
    that the test itself calls logs as ``plugin``."""
    metrics: dict[str, float] = {}
    with running(plugin, deque()):
        yield metrics
        metrics |= weighted_means(take_logged())


def run_as(plugin: str, hook: str, owner: object, names: Sequence[str], function: Function) -> Any:
    """An implementation or a wrapper of a sync hook, as code of the plugin; it takes ``names``."""

    def call(arguments: Sequence[Any]) -> AbstractContextManager[None]:
        given = dict(zip(names, arguments, strict=True))
        return running(plugin, hook=hook, owner=owner, arguments=given)

    @wraps(function)
    def plain(*arguments: Any) -> Any:
        with call(arguments):
            return function(*arguments)

    @wraps(function)
    def wrapper(*arguments: Any) -> Generator[Any, Any, Any]:
        with call(arguments):  # what it wraps sets and resets a name of its own
            return (yield from function(*arguments))

    return wrapper if inspect.isgeneratorfunction(function) else plain


class ReadOnly(dict[str, float]):
    """Metrics that a plugin may not add to: the key would be dropped."""

    def __setitem__(self, *arguments: Any, **more: Any) -> Any:
        raise PluginError(
            "these metrics are read only. Log one of your own by prime_rl.log_metric(name, value), "
            "in a hook, or add to a copy: dict(metrics)."
        )

    update = setdefault = __ior__ = __setitem__
