"""From an import path in the TOML to a function, and every way in which that can be wrong."""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from prime_rl.errors import ConfigError

_POSITIONAL = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
    inspect.Parameter.VAR_POSITIONAL,
)
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def load_function(path: str) -> Callable[..., Any]:
    """What ``module.function`` or ``module:function`` names.

    Modules of the working directory are found too. Raises ``ConfigError`` for a path of another
    form, a module that is not there or fails, a missing attribute, and one that is no function.
    """
    module_name, attribute = _split(path)
    found = _import(path, module_name)
    for part in attribute.split("."):
        if not hasattr(found, part):
            functions = [n for n, each in vars(found).items() if inspect.isroutine(each)]
            raise ConfigError(
                f"import_path {path!r}: module {module_name!r} has no {attribute!r}, expected a "
                f"function of that name. {_suggest(part, functions, 'Functions there')}"
            )
        found = getattr(found, part)
    if not callable(found):
        raise ConfigError(
            f"import_path {path!r}: found a {type(found).__name__}, expected a function. Name the "
            "function itself."
        )
    return found  # type: ignore[no-any-return]


def import_function(path: str, kwargs: Mapping[str, Any], first: str) -> Callable[..., Any]:
    """The function of an import path in the TOML, which is called as ``fn(<first>, **kwargs)``.

    Raises ``ConfigError`` if it is not there, or cannot be called like that.
    """
    function = load_function(path)
    check_call(function, path, kwargs, first)
    return function


def check_call(
    function: Callable[..., Any], path: str, kwargs: Mapping[str, Any], first: str
) -> None:
    """Whether ``function(<first>, **kwargs)`` can be called. Raises ``ConfigError`` saying what is
    in the way."""
    if inspect.iscoroutinefunction(function):
        raise ConfigError(
            f"import_path {path!r}: the function is async and would never be awaited. "
            "Write it with 'def'."
        )
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # compiled and silent about what it takes: the first call will tell
    parameters = list(signature.parameters.values())
    if not parameters or parameters[0].kind not in _POSITIONAL:
        raise ConfigError(
            f"import_path {path!r}: the function has the signature {signature}, expected "
            f"fn({first}, **kwargs). Give it a first parameter for the {first}."
        )
    _check_kwargs(parameters[1:], path, kwargs)


def _check_kwargs(
    parameters: Iterable[inspect.Parameter], path: str, kwargs: Mapping[str, Any]
) -> None:
    by_name = {each.name: each for each in parameters if each.kind in _BY_NAME}
    takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters)
    for name in kwargs:
        if name not in by_name and not takes_any:
            raise ConfigError(
                f"import_path {path!r}: the function takes no {name!r}, which kwargs gives. "
                f"{_suggest(name, by_name, 'It takes')}"
            )
    required = [name for name, each in by_name.items() if each.default is each.empty]
    if missing := [name for name in required if name not in kwargs]:
        raise ConfigError(
            f"import_path {path!r}: the function needs {', '.join(map(repr, missing))}, which "
            "kwargs does not give. Add it to kwargs, or give the parameter a default."
        )


def _split(path: str) -> tuple[str, str]:
    module, _, attribute = path.partition(":") if ":" in path else path.rpartition(".")
    if not all(part.isidentifier() for part in (*module.split("."), *attribute.split("."))):
        raise ConfigError(
            f"import_path: got {path!r}, expected 'module.function' or 'module:function'"
        )
    return module, attribute


def _import(path: str, module: str) -> Any:
    try:
        with _working_directory_importable():
            return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module}.".startswith(f"{error.name}."):
            raise ConfigError(
                f"import_path {path!r}: there is no module {error.name!r}, neither installed nor "
                f"in the working directory {os.getcwd()}. Start the run where it lies, or install "
                "its package."
            ) from error
        raise _failed(path, module, error) from error
    except Exception as error:
        raise _failed(path, module, error) from error


def _failed(path: str, module: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"import_path {path!r}: module {module!r} is there, but importing it failed: "
        f"{type(error).__name__}: {error}. Mend it."
    )


@contextmanager
def _working_directory_importable() -> Iterator[None]:
    """For the moment, as ``python -m`` does: an installed command does not have it on its path."""
    here = os.getcwd()
    sys.path.insert(0, here)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(here)


def _suggest(name: str, known: Iterable[str], what: str) -> str:
    known = list(known)
    if close := difflib.get_close_matches(name, known, n=1):
        return f"Did you mean {close[0]!r}?"
    return f"{what}: {', '.join(known) or 'none'}."
