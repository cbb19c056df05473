"""State that envs share by accident: attributes of a class, and default arguments of its methods,
where each env has an instance of its own.

Either is one object for all instances. What one env's algorithm writes into it changes
the credit of every other env that runs the same class.
"""

from __future__ import annotations

import inspect
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from types import FunctionType
from typing import Any

import numpy as np

from prime_rl.errors import PluginError
from prime_rl.plugins.base import Offer
from prime_rl.registry.calls import Call, blame

CONTAINERS = (list, dict, set, deque, bytearray, np.ndarray)


class ClassState:
    """The attributes of some classes as they are now."""

    def __init__(self, classes: Iterable[type[Any]]) -> None:
        self.classes = [*classes]
        self._before = {cls: _state(cls) for cls in self.classes}

    def changed(self) -> str | None:
        """The first attribute that is not as it was, as ``Class.name``, or the method with such a
        default argument."""
        for cls, before in self._before.items():
            now = vars(cls)
            for name in now.keys() | before.keys():
                if name.startswith("__") or name == "_abc_impl":
                    continue
                if name not in before or name not in now:
                    return f"{cls.__qualname__}.{name}"

                value, copy, defaults = before[name]
                if now[name] is not value or not _equal(_content(value), copy):
                    return f"{cls.__qualname__}.{name}"
                if not _equal(_defaults(value), defaults):
                    return f"a default argument of {cls.__qualname__}.{name}"

        return None


def own_classes(instance: Offer) -> list[type[Any]]:
    """The classes of an instance that a plugin wrote."""
    return [cls for cls in type(instance).__mro__ if not cls.__module__.startswith("prime_rl.")
            and cls is not object]  # fmt: skip


class SharedState:
    """Watches the classes that several envs of a run, or agents of an env, have instances of."""

    def __init__(self, algorithms: Mapping[str, Offer | Sequence[Offer]]) -> None:
        """``algorithms``: one for each env; several if its agents have algorithms of their own."""
        self._algorithms = {
            env: [each] if isinstance(each, Offer) else [*each] for env, each in algorithms.items()
        }

        number = Counter(
            cls
            for several in self._algorithms.values()
            for each in several
            for cls in own_classes(each)
        )

        self._watched = {
            env: ClassState(
                dict.fromkeys(
                    cls for each in several for cls in own_classes(each) if number[cls] > 1
                )
            )
            for env, several in self._algorithms.items()
        }

    def check(self, env: str, hook: str, arguments: Mapping[str, Any]) -> None:
        """Raise ``PluginError`` if a class that this env shares with another one has changed."""
        state = self._watched.get(env)
        changed = state.changed() if state is not None else None
        if changed is None or state is None:
            return

        watched = {*state.classes}
        others = [
            repr(other)
            for other, several in self._algorithms.items()
            if other != env and any({*own_classes(each)} & watched for each in several)
        ]

        sharers = f"agents of the env {env!r}"
        if others:
            sharers = f"the envs {env!r} and {', '.join(others)}"

        error = PluginError(
            f"{changed} has changed while groups were scored, and it is one object for {sharers}: "
            "what one learns changes the credit of the other. Keep it on self: assign it in "
            "__init__."
        )
        algorithms = self._algorithms[env]
        algorithm = next(each for each in algorithms if {*own_classes(each)} & watched)
        blame(error, Call(algorithm.name, hook, owner=algorithm, arguments=arguments))
        raise error


def _state(cls: type[Any]) -> dict[str, tuple[Any, Any, Any]]:
    return {
        name: (value, _copy(_content(value)), _copy(_defaults(value)))
        for name, value in vars(cls).items()
        if not name.startswith("__")
    }


def _content(value: Any) -> Any:
    """What of a value can change in place: a container, or the attributes of an object of a
    plugin's class. None: nothing."""
    if isinstance(value, CONTAINERS):
        return value
    module = type(value).__module__.partition(".")[0]
    if module in ("builtins", "functools", "logging", "re", "threading", "typing", "prime_rl"):
        return None
    return getattr(value, "__dict__", None) if not callable(value) else None


def _defaults(value: Any) -> list[Any]:
    """What can change in place of the default arguments of a method."""
    for inner in ("__func__", "fget"):  # a static method, a property
        value = getattr(value, inner, value)
    function = inspect.unwrap(value) if callable(value) else None
    if not isinstance(function, FunctionType):
        return []

    by_name = function.__kwdefaults__ or {}
    return [_content(each) for each in (*(function.__defaults__ or ()), *by_name.values())]


def _copy(value: Any) -> Any:
    try:
        return deepcopy(value)
    except Exception:  # a lock or a connection: not watched
        return _Unknown


class _Unknown:
    """Content that cannot be copied."""


def _equal(value: Any, copy: Any) -> bool:
    if copy is _Unknown:
        return True
    if isinstance(value, np.ndarray):
        return np.array_equal(value, copy)
    try:
        return bool(value == copy)
    except ValueError:  # arrays in a container
        return repr(value) == repr(copy)
