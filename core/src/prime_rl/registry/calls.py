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
import warnings
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import wraps
from importlib.metadata import EntryPoint
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import Any, SupportsFloat, TypeAlias

from prime_rl.entries import entries
from prime_rl.errors import PluginError, PrimeRLError, StreamError, Terminated, text_of
from prime_rl.plugins.hookspecs import PROJECT, TRAINER_GROUP
from prime_rl.plugins.status import Facts
from prime_rl.registry.guards import is_number
from prime_rl.rollout import CALLER, LATE

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
    ended: bool = False
    dropped: list[str] = field(default_factory=list)
    """Coroutines of the plugin that this call made and nothing awaited."""
    task: object = field(default_factory=_task)
    """The asyncio task that calls; None: no task."""
    writers: list[Any] = field(default_factory=list)
    """Other tasks that have written credit in this call."""
    started: float = field(default_factory=time.monotonic)

    def wrote(self) -> None:
        """Credit is being written in this call."""
        task = _task()
        if task not in (None, self.task, *self.writers):
            self.writers.append(task)

    @property
    def unseen_error(self) -> BaseException | None:
        """The error of a task that has written credit, and that nothing has awaited."""
        for task in self.writers:
            # asyncio clears this private attribute as soon as anything asks for the error.
            if getattr(task, "_log_traceback", False):
                error: BaseException = task.exception()
                return error
        return None

    @property
    def package(self) -> str:
        """The top-level package of the code."""
        module = getattr(self.owner, "__name__", "") or type(self.owner).__module__
        return str(module).partition(".")[0]

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
            if name == "batches":
                return f"envs {', '.join(map(repr, value))}"

            # The argument is a list of groups, a group or a rollout: its first rollout tells where.
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
    package = module.partition(".")[0]
    if package == "prime_rl":
        return None

    for group in (PROJECT, TRAINER_GROUP):
        for entry in entries(group):
            if entry.value.partition(":")[0].partition(".")[0].strip() == package:
                return entry

    return None


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
    if call is None:
        call = _call_among([frame for frame, _ in frames])

    if call is None:
        return None
    if isinstance(error, PrimeRLError):  # many name the env themselves
        place = "" if str(error).startswith("env ") or not call.place else f", {call.place}"
        return f"{call.source}, {call.hook}{place}: {error}"

    package = call.package
    summaries = traceback.extract_tb(error.__traceback__)
    shown = []
    for summary, (frame, _) in zip(summaries, frames, strict=True):
        is_of_plugin = package != "prime_rl" and _module_of(frame).partition(".")[0] == package
        is_installed = summary.filename.startswith((CORE, STDLIB, *INSTALLED))
        if is_of_plugin or not is_installed:
            shown.append(summary)

    lines = "".join(traceback.format_list(shown)).rstrip()
    return f"{call}: {type(error).__name__}: {text_of(error)}\n{lines}".rstrip()


def _call_among(frames: Iterable[FrameType]) -> Call | None:
    """The outermost call of a plugin's code. Core calls samplers and observers without ``running``,
    so only the modules of the frames name the plugin."""
    for frame in frames:
        module = _module_of(frame)
        entry = _entry_of(module)
        if entry is not None:
            return Call(
                entry.name,
                frame.f_code.co_qualname,
                owner=sys.modules.get(module),
                arguments={},
            )

    return None


def _module_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


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

        logged.append((f"plugin/{plugin}/{name}", _number(value), _number(weight, minimum=0.0)))
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise PluginError(
            f"plugin {plugin!r}: log_metric{(name, value, weight)}: expected a name of letters, "
            "digits and _.@- between slashes, a finite number or a 0-dim tensor, a weight >= 0"
        ) from error


def _number(number: Any, minimum: float = -math.inf) -> Any:
    if hasattr(number, "detach") and not number.dim():
        return number.detach().clone()  # the plugin may change its tensor in place

    value = float(number)
    if not math.isfinite(value) or value < minimum:
        raise ValueError(value)
    return value


def take_logged() -> list[tuple[str, Any, Any]]:
    """What was logged since the last call."""
    logged = _running.get()[1]
    # A thread of a plugin may append meanwhile: the loop takes what is there now.
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

        # 0 times a value that is not finite would make the mean NaN.
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
    """The code inside counts as the plugin's code. ``logged`` keeps its values apart from the
    process's. With a ``hook``, the call is in ``RUNNING`` and is to blame for an error."""
    token = _running.set((plugin, _running.get()[1] if logged is None else logged))
    call = Call(plugin, hook, owner=owner, arguments=arguments)
    caller = CALLER.set(call) if hook else None

    try:
        if hook:
            RUNNING[id(call)] = call
        yield
        # These checks run only if the hook returned: an error of its own tells more.
        if call.dropped:
            raise PluginError(
                f"the coroutine {call.dropped[0]}() was never awaited, so its body has not run. "
                "Write await before the call, in an async def."
            )

        unseen = call.unseen_error
        if unseen is not None:
            raise PluginError(
                "a task that writes credit failed, and the hook does not await it, so a part of "
                f"the credit is missing: {type(unseen).__name__}: {text_of(unseen)}. Await the "
                "task (await, asyncio.gather, asyncio.TaskGroup)."
            ) from unseen
    except (StopIteration, StopAsyncIteration) as error:
        if not hook:
            raise

        # A coroutine around the hook would make a RuntimeError of it, without its traceback.
        refused = PluginError(
            f"it raised {type(error).__name__}: next() has found nothing. Give next() a default, "
            "as in next(items, None), or raise an exception that says what is missing."
        )
        blame(refused, call)
        raise refused.with_traceback(error.__traceback__) from error
    except Exception as error:
        if hook:
            blame(error, call)
        raise
    except SystemExit as error:
        if not hook or isinstance(error, Terminated):
            raise
        raise exit_refused(error, call) from error
    except BaseException as error:
        problem = _no_exception(error, call) if hook else None
        if problem is None:
            raise

        refused = PluginError(problem)
        blame(refused, call)
        raise refused.with_traceback(error.__traceback__) from error
    finally:
        # Tasks and threads that the hook left behind must not write credit from here on.
        call.ended = True
        RUNNING.pop(id(call), None)
        _running.reset(token)
        if caller is not None:
            CALLER.reset(caller)


def _no_exception(error: BaseException, call: Call) -> str | None:
    """What is wrong with an error of a plugin that is no ``Exception``. None: it comes from outside
    of the plugin, which is being cancelled, closed or interrupted."""
    if isinstance(error, KeyboardInterrupt | GeneratorExit):
        return None

    if type(error).__module__ == "_pytest.outcomes":
        return None  # a skip or a failure in the plugin's own tests

    asyncio = sys.modules.get("asyncio")  # the trainer has no event loop
    if asyncio is not None and isinstance(error, asyncio.CancelledError):
        cancelling = getattr(call.task, "cancelling", None)
        if cancelling is not None and cancelling():
            return None

        return (
            "it raised CancelledError, and nothing has cancelled the hook: what it awaited was "
            "cancelled, by itself or by another task. Catch it, and raise what is wrong."
        )

    return (
        f"it raised {type(error).__name__}, which is no Exception (as a panic in a library that is "
        f"written in Rust): {text_of(error)}. It would end the process without a word "
        "about the plugin. Catch it in the hook, and raise what is wrong."
    )


def exit_refused(error: SystemExit, call: Call | None = None) -> PluginError:
    """What a ``SystemExit`` in a plugin's code becomes. By itself it would end the process as if
    the run were done. ``call``: None where only the traceback tells whose code it was."""
    refused = PluginError(
        f"it raised SystemExit({error.code!r}), which would end the process in the middle of the "
        "run. Raise an exception that says what is wrong, or return."
    )
    if call is not None:
        blame(refused, call)
    return refused.with_traceback(error.__traceback__)


@contextmanager
def watching_coroutines() -> Iterator[None]:
    """Within it, a coroutine of a plugin that nothing awaited is an error: of the call of a hook
    that dropped it, else of the run (``rollout.LATE``). Otherwise Python only warns of it."""
    before = sys.unraisablehook

    def look(unraisable: Any) -> None:
        coroutine = unraisable.object
        if not (unraisable.exc_type is RuntimeWarning and inspect.iscoroutine(coroutine)):
            before(unraisable)
            return

        frame = coroutine.cr_frame
        module = str(frame.f_globals.get("__name__", "")) if frame else ""
        name = coroutine.__qualname__

        call = CALLER.get()
        # A coroutine dropped inside its own hook fails that call. Any other ends the run.
        if call is not None and not call.ended and call.package == module.partition(".")[0]:
            call.dropped.append(name)
            return

        entry = _entry_of(module)
        if entry is None:
            before(unraisable)
            return

        late = Call(entry.name, name, owner=sys.modules.get(module), arguments={}, ended=True)
        problem = "its coroutine was never awaited, so its body has not run. Await it."
        LATE.append((StreamError(problem), late))

    with warnings.catch_warnings():
        # A warning that is an error reaches `unraisablehook`, which also gets the coroutine.
        message = "coroutine .* was never awaited"
        warnings.filterwarnings("error", message=message, category=RuntimeWarning)
        sys.unraisablehook = look

        try:
            yield
        finally:
            sys.unraisablehook = before


def raise_late() -> None:
    """Raise what code that a hook left behind has done since, which nothing awaits."""
    if LATE:
        error, call = LATE[0]
        LATE.clear()
        if call is not None:
            blame(error, call)
        raise error


def checked_metrics(metrics: Mapping[str, Any], owner: object, hook: str) -> Mapping[str, Any]:
    """What a method of a plugin gave as metrics. Raises ``PluginError`` for a value that is no
    number: whatever reports it would fail in its place."""
    for name, value in metrics.items():
        if not is_number(value):
            plugin = str(getattr(owner, "name", type(owner).__name__))
            error = PluginError(
                f"the metric {name!r} is {value!r}, expected a number. Log text by a logger."
            )
            blame(error, Call(plugin, hook, owner=owner, arguments={}))
            raise error

    return metrics


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
        by_name = dict(zip(names, arguments, strict=True))
        return running(plugin, hook=hook, owner=owner, arguments=by_name)

    @wraps(function)
    def plain(*arguments: Any) -> Any:
        with call(arguments):
            return function(*arguments)

    @wraps(function)
    def wrapper(*arguments: Any) -> Generator[Any, Any, Any]:
        with call(arguments):  # what it wraps sets and resets a name of its own
            return (yield from passing_on(function(*arguments)))

    return wrapper if inspect.isgeneratorfunction(function) else plain


SWALLOWED = "swallowed the error of what it wraps"


def passing_on(wrapper: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
    """A hook's wrapper. Raises ``PluginError`` if it swallows the error of what it wraps: the run
    would go on as if the hook had done its work."""
    yielded = next(wrapper)
    try:
        result = yield yielded
    except BaseException as error:
        try:
            wrapper.throw(error)
        except StopIteration:
            # StopIteration: the wrapper caught the error and returned.
            if not isinstance(error, Exception):  # a cancelled run
                raise error from None

            source = f"{fault(error) or f'{type(error).__name__}: {text_of(error)}'}".splitlines()[
                0
            ]
            raise PluginError(
                f"this wrapper {SWALLOWED} ({source}), and the run would go on without its work. "
                "Catch nothing around the yield; put what must run into a finally."
            ) from error

        raise RuntimeError("generator didn't stop: the wrapper has a second yield") from error

    try:
        wrapper.send(result)
    except StopIteration as end:
        return end.value

    raise RuntimeError("generator didn't stop: the wrapper has a second yield")


class ReadOnly(dict[str, float]):
    """Metrics that a plugin may not add to: the key would be dropped."""

    def _refuse(self, *arguments: Any, **more: Any) -> Any:
        raise PluginError(
            "these metrics are read only. Log one of your own by prime_rl.log_metric(name, value), "
            "in a hook, or add to a copy: dict(metrics)."
        )

    __setitem__ = _refuse
    __ior__ = _refuse
    setdefault = _refuse
    update = _refuse
