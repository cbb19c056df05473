"""What verifiers computes again for every rollout, computed once.

Half of the CPU time of a single-turn rollout went to the same answers again and again: signatures
and type hints of a task's hooks, the marked methods of a class, a harness's module, the hash of a
task's data, signatures of pydantic's default factories, the tokens of a renderer's header; and to a
folder on disk that nothing wrote to. ``install`` replaces these functions of verifiers, and one
each of pydantic and renderers, by ones with the same results.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import MethodType, ModuleType, SimpleNamespace
from typing import Any, get_type_hints

import pydantic._internal._fields as pydantic_fields
import renderers.reasoning as reasoning
import verifiers.v1.harness as harness
import verifiers.v1.rollout as rollout
import verifiers.v1.session as session
import verifiers.v1.task as task
import verifiers.v1.utils.decorators as decorators
import verifiers.v1.utils.loaders as loaders
import verifiers.v1.utils.memory as memory
from verifiers.v1.runtimes.subprocess import CACHE_DIR, SubprocessRuntime

ROLLOUTS_PER_TRIM = 4096
"""``malloc_trim`` walks the whole heap, so its cost grows with the rollouts in flight. verifiers
calls it every 16 rollouts."""

Hook = Callable[..., Any]


def install() -> None:
    """Replace the functions, once per process."""
    if decorators.discover_decorated is marked_methods:
        return
    signature = per_function(inspect.signature)
    hints = per_function(get_type_hints)
    for module in (decorators, session):
        module.inspect = SimpleNamespace(**vars(inspect) | {"signature": signature})
        module.get_type_hints = hints

    for module in (decorators, rollout, task, harness):
        module.discover_decorated = marked_methods
    takes_data = pydantic_fields.takes_validated_data_argument
    setattr(pydantic_fields, takes_data.__name__, per_function(takes_data))
    reasoning._after_header = with_known_headers(reasoning._after_header)
    loaders._import_plugin = while_imported(loaders._import_plugin)
    memory._TRIM_EVERY_ROLLOUTS = ROLLOUTS_PER_TRIM
    task.Task.hash = property(hash_of(task.Task.hash.fget))
    SubprocessRuntime.start = start
    SubprocessRuntime.workdir = property(workdir, set_workdir)
    for name in ("teardown", "cleanup"):
        setattr(SubprocessRuntime, name, if_made(getattr(SubprocessRuntime, name)))


def per_function(compute: Callable[[Hook], Any]) -> Callable[[Hook], Any]:
    """``compute``, once per function: a bound method is a new object each time, and holds its
    task."""
    known: dict[Hook, Any] = {}

    def cached(hook: Hook) -> Any:
        function = hook.__func__ if isinstance(hook, MethodType) else hook
        try:
            if function not in known:
                known[function] = compute(hook)
        except TypeError:  # an object without a hash, or one that ``compute`` refuses
            return compute(hook)
        return known[function]

    return cached


class KnownHeaders:
    """A tokenizer that encodes a text once. For headers, of which there are few."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.decode = tokenizer.decode
        self.known: dict[str, list[int]] = {}

    def encode(self, text: str, **how: bool) -> list[int]:
        if text not in self.known:
            self.known[text] = self.tokenizer.encode(text, **how)
        return self.known[text]


def with_known_headers(after_header: Callable[..., list[int]]) -> Callable[..., list[int]]:
    """``after_header``, which is called three times a turn, without encoding its header again."""
    last: list[KnownHeaders] = []

    def found(tokenizer: Any, *arguments: Any, **named: Any) -> list[int]:
        is_known = last and last[0].tokenizer is tokenizer
        last[:] = [headers := last[0] if is_known else KnownHeaders(tokenizer)]
        return after_header(headers, *arguments, **named)

    return found


def while_imported(find: Callable[..., ModuleType]) -> Callable[..., ModuleType]:
    """``find``, once for as long as its module is in ``sys.modules``."""
    known: dict[tuple[str, ...], ModuleType] = {}

    def cached(*plugin: str) -> ModuleType:
        __tracebackhide__ = True  # an error below is of the plugin
        module = known.get(plugin)
        if module is None or sys.modules.get(module.__name__) is not module:
            module = known[plugin] = find(*plugin)
        return module

    return cached


@functools.cache
def _names(kind: type, mark: str) -> list[str]:
    return [
        name
        for name in sorted({name for each in kind.__mro__ for name in vars(each)})
        if any(callable(f := vars(e).get(name)) and hasattr(f, mark) for e in kind.__mro__)
    ]


def marked_methods(owner: Any, mark: str) -> list[Hook]:
    """The methods of ``owner`` with a mark, by priority and name."""
    kind: Any = type(owner)
    members = [getattr(owner, name) for name in _names(kind, mark)]
    methods = [method for method in members if hasattr(method, mark)]
    methods.sort(key=lambda m: (-getattr(m, f"{mark}_priority", 0), m.__name__))
    return methods


def hash_of(compute: Callable[[Any], str]) -> Callable[[Any], str]:
    """``Task.hash``, once for a task's data, which is frozen."""

    def cached(owner: Any) -> str:
        known: tuple[Any, str] = owner.__dict__.get("_in_process_hash", (None, ""))
        if known[0] is not owner.data:
            known = owner.__dict__["_in_process_hash"] = owner.data, compute(owner)
        return known[1]

    return cached


class _Folder:
    """The folder of one runtime and its views, created by the first use."""

    def __init__(self, path: Path, made: bool = False) -> None:
        self.path = path
        self.made = made

    def make(self) -> Path:
        if not self.made:
            self.path.mkdir(parents=True)
            self.made = True
        return self.path


async def start(self: Any) -> None:
    """Choose the runtime's folder."""
    self._folder = _Folder(CACHE_DIR / "runtimes" / "subprocess" / self.name)
    self.info.id = str(self._folder.path)


def workdir(self: Any) -> Path | None:
    """The runtime's folder, created if it is not there yet. None before the start."""
    return None if self._folder is None else self._folder.make()


def set_workdir(self: Any, path: Path | None) -> None:
    self._folder = None if path is None else _Folder(path, made=True)


def if_made(method: Hook) -> Hook:
    """``method``, unless the runtime has no folder and so no process."""

    async def nothing() -> None:
        pass

    @functools.wraps(method)
    def run(self: Any) -> Any:
        if self._folder is None or self._folder.made or self._background:
            return method(self)
        return nothing() if inspect.iscoroutinefunction(method) else None

    return run
