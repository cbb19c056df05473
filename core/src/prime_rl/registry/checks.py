"""Refuse what pluggy would accept and then never call."""

from __future__ import annotations

import difflib
import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from prime_rl.errors import PluginError
from prime_rl.plugins import hookspecs
from prime_rl.plugins.hookspecs import PROJECT, TRAINER_GROUP

CONTRACT_VERSION = 2
"""Version of the plugin contract: hooks, base classes, streams."""
OLDEST_CONTRACT = 1
"""Plugins written for a version from this one on run unchanged."""

SPECS: dict[str, Callable[..., Any]] = {
    name: spec for name, spec in vars(hookspecs).items() if hasattr(spec, f"{PROJECT}_spec")
}
ASYNC_HOOKS = {name for name, spec in SPECS.items() if inspect.iscoroutinefunction(spec)}
TRAINER_HOOKS = {
    "register_losses",
    "register_heads",
    "register_trainer_observers",
    "register_tunings",
    "register_kernels",
    "register_optimizers",
}
SHARED_HOOKS = {"register_weight_transports", "register_observers"}
"""Hooks of both entry-point groups."""

DEPRECATED: dict[str, tuple[str, int]] = {
    "register_monitors": ("register_observers, which takes monitors too", 4),
    "register_trainer_observers": ("register_observers, which takes them too", 4),
    "batch_packed": ("the method batch_sent of an Observer (register_observers)", 4),
    "step_finished": ("the method step_trained of an Observer (register_observers)", 4),
    "weights_published": ("the method version_served of an Observer (register_observers)", 4),
}
"""What a later contract version removes: a hook (``score_group``), an argument of one
(``step_finished.step``) or a method of a base class (``Algorithm.close``); with each, what to use
instead, and the first version without it."""

_MARK = f"{PROJECT}_impl"


def check_plugin(plugin: object, where: str, group: str) -> None:
    """Raise ``PluginError`` for the first hook that pluggy would ignore. ``where`` names plugin and
    distribution."""
    _check_version(plugin, where)
    for name, function in _functions(plugin):
        marked = hasattr(function, _MARK)
        if name in SPECS and not marked:
            raise PluginError(
                f"plugin {where}: {name!r} has a hook's name but no @hookimpl, so it would never "
                "be called. Decorate it (an override needs it too) or rename it."
            )

        meant = None if marked or name in SPECS else _misspelt_hook(plugin, name, function)
        if meant:
            raise PluginError(
                f"plugin {where}: {name!r} is no hook and has no @hookimpl, so it would never be "
                f"called; did you mean {meant!r}? If it is a helper, begin its name with '_'."
            )

        if marked:
            _check_hook(name, function, where=where, group=group)
        _warn_of_deprecated(plugin, name, function=function, where=where)


def marked_hooks(plugin: object) -> list[str]:
    """Names of the hooks that a plugin or class implements."""
    return [name for name, f in _functions(plugin) if hasattr(f, _MARK) and name in SPECS]


def _functions(plugin: object) -> Iterator[tuple[str, Callable[..., Any]]]:
    """The functions of a module, class or object, in name order, without calling its
    descriptors."""
    classes = plugin.__mro__ if isinstance(plugin, type) else type(plugin).__mro__
    members: dict[str, Any] = {}
    # Base classes come first, so that an override replaces its original.
    for each in reversed(classes):
        if each is not object:  # its methods are no hooks
            members.update(vars(each))

    if not isinstance(plugin, type):
        members.update(getattr(plugin, "__dict__", {}))

    for name in sorted(members):
        function = getattr(members[name], "__func__", members[name])  # static and class methods
        if inspect.isroutine(function):
            yield name, function


def _warn_of_deprecated(
    plugin: object, name: str, function: Callable[..., Any], where: str
) -> None:
    """Its reader is the user of the plugin ``where``, not its author."""
    bases = plugin.__mro__ if isinstance(plugin, type) else ()
    used = [f"{each.__name__}.{name}" for each in bases if vars(each).get(name) is not function]

    if hasattr(function, _MARK):
        used = [name, *(f"{name}.{taken}" for taken in inspect.signature(function).parameters)]

    for key in used:
        if key in DEPRECATED:
            instead, gone_in = DEPRECATED[key]
            # The warning shows the plugin's file and line, not ours.
            code = inspect.unwrap(function).__code__
            text = (
                f"plugin {where}: {key!r} goes with contract version {gone_in}; use {instead}. "
                "Upgrade the plugin, or report it to its author."
            )
            warnings.warn_explicit(text, FutureWarning, code.co_filename, code.co_firstlineno)


def _misspelt_hook(plugin: object, name: str, function: Callable[..., Any]) -> str | None:
    """The hook that an unmarked function of a module looks like: by its name, and since it takes
    nothing but arguments of that hook. Of classes, ``members`` looks at each method."""
    if not inspect.ismodule(plugin) or not inspect.isfunction(function) or name.startswith("_"):
        return None
    close = difflib.get_close_matches(name, SPECS, n=1, cutoff=0.85)
    if not close or name in SPECS:
        return None

    (hook,) = close
    taken = set(inspect.signature(function).parameters)
    passed = set(inspect.signature(SPECS[hook]).parameters)
    # A function that takes nothing is like a hook only if nothing is passed to the hook.
    looks_like_it = taken <= passed and (bool(taken) or not passed)
    return hook if looks_like_it else None


def _check_version(plugin: object, where: str) -> None:
    attributes = {} if isinstance(plugin, type) else getattr(plugin, "__dict__", {})
    for name in attributes:
        if name == "prime_rl_contract":
            continue
        if difflib.get_close_matches(name, ["prime_rl_contract"], n=1, cutoff=0.85):
            raise PluginError(
                f"plugin {where}: {name!r} is read by nothing; did you mean 'prime_rl_contract'?"
            )

    asked = getattr(plugin, "prime_rl_contract", CONTRACT_VERSION)
    # `isinstance` would accept True, which is an int.
    if type(asked) is not int:
        raise PluginError(
            f"plugin {where}: prime_rl_contract is {asked!r}, expected a whole number: the "
            f"contract version the plugin was written for, such as {CONTRACT_VERSION}."
        )

    if not OLDEST_CONTRACT <= asked <= CONTRACT_VERSION:
        way_out = "prime-rl-core" if asked > CONTRACT_VERSION else "the plugin"
        raise PluginError(
            f"plugin {where} asks for contract version {asked}, this prime-rl-core speaks "
            f"{OLDEST_CONTRACT} to {CONTRACT_VERSION}. Upgrade {way_out}, or list the plugin under "
            "plugins.disabled."
        )


def _check_hook(name: str, function: Callable[..., Any], where: str, group: str) -> None:
    if name not in SPECS:
        close = difflib.get_close_matches(name, SPECS, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else f". Hooks: {', '.join(SPECS)}."
        raise PluginError(f"plugin {where}: {name!r} is not a hook{hint}")

    right_group = TRAINER_GROUP if name in TRAINER_HOOKS else PROJECT
    if group != right_group and name not in SHARED_HOOKS:
        raise PluginError(
            f"plugin {where}: {name!r} is never called from the entry-point group {group!r}. "
            f'Offer it under [project.entry-points."{right_group}"].'
        )

    if inspect.iscoroutinefunction(function) and name not in ASYNC_HOOKS:
        raise PluginError(
            f"plugin {where}: {name!r} is a sync hook, so an 'async def' would never be awaited. "
            "Do model I/O in 'score_rollout' or 'score_group', which are async."
        )

    options = getattr(function, _MARK)
    if options["tryfirst"] and options["trylast"]:
        raise PluginError(
            f"plugin {where}: {name!r} asks to run first and last. Leave out tryfirst or trylast."
        )

    _check_generator(name, function, where)
    expected = list(inspect.signature(SPECS[name]).parameters)
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name not in (*expected, "self", "cls"):
            raise PluginError(
                f"plugin {where}: {name!r} takes an argument {parameter.name!r}, which the hook "
                f"does not have. It may take any of: {', '.join(expected) or 'none'}."
            )

        if parameter.default is not parameter.empty:
            raise PluginError(
                f"plugin {where}: argument {parameter.name!r} of {name!r} has a default, and "
                "pluggy then never passes it. Remove the default."
            )


def _check_generator(name: str, function: Callable[..., Any], where: str) -> None:
    """Only a wrapper may be a generator: the body of any other generator never runs."""
    options = getattr(function, _MARK)
    if options["hookwrapper"]:
        raise PluginError(
            f"plugin {where}: {name!r} is an old-style wrapper. Use @hookimpl(wrapper=True): its "
            "'yield' gives the result itself."
        )

    if options["wrapper"] and not inspect.isgeneratorfunction(function):
        raise PluginError(
            f"plugin {where}: {name!r} is a wrapper and not a generator function. A wrapper is a "
            "plain 'def' with one 'yield', around an async hook too: what follows the 'yield' runs "
            "when everything it wraps is done."
        )

    generates = inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)
    # Core iterates over the result of a `register_...` hook, so that may be a generator.
    if generates and not options["wrapper"] and not name.startswith("register_"):
        raise PluginError(
            f"plugin {where}: {name!r} has a 'yield', so its body would never run. A wrapper needs "
            "@hookimpl(wrapper=True). Any other hook returns its result."
        )
