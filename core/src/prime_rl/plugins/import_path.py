"""From an import path in the TOML to a function."""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from prime_rl.errors import ConfigError

_POSITIONAL = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
    inspect.Parameter.VAR_POSITIONAL,
)
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def import_function(path: str, kwargs: Mapping[str, Any], first: str) -> Callable[..., Any]:
    """The function of an import path in the TOML, to be called as ``fn(<first>, **kwargs)``.

    ``module.function`` or ``module:function``; modules of the working directory are found too.
    Raises ``ConfigError`` if it does not exist, or cannot be called like that.
    """
    module_name, _, attribute = path.partition(":") if ":" in path else path.rpartition(".")
    if not all(part.isidentifier() for part in (*module_name.split("."), *attribute.split("."))):
        raise ConfigError(
            f"import_path: got {path!r}, expected 'module.function' or 'module:function'"
        )
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
    _check_call(found, path, kwargs, first)
    return found  # type: ignore[no-any-return]


def _check_call(
    function: Callable[..., Any], path: str, kwargs: Mapping[str, Any], first: str
) -> None:
    if inspect.iscoroutinefunction(function):
        raise ConfigError(
            f"import_path {path!r}: the function is async and would never be awaited. "
            "Write it with 'def'."
        )
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # compiled code may have no signature: the first call will show
    parameters = list(signature.parameters.values())
    if not parameters or parameters[0].kind not in _POSITIONAL:
        raise ConfigError(
            f"import_path {path!r}: the function has the signature {signature}, expected "
            f"fn({first}, **kwargs). Give it a first parameter for the {first}."
        )
    by_name = {each.name: each for each in parameters[1:] if each.kind in _BY_NAME}
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


def _import(path: str, module: str) -> Any:
    here = os.getcwd()
    # As ``python -m`` does: an installed command does not have the working directory on its path.
    sys.path.insert(0, here)
    importlib.invalidate_caches()
    try:
        return importlib.import_module(module)
    except Exception as error:
        absent = error.name if isinstance(error, ModuleNotFoundError) else None
        if absent is not None and f"{module}.".startswith(f"{absent}."):
            raise ConfigError(
                f"import_path {path!r}: there is no module {absent!r}, neither installed nor in "
                f"the working directory {here}. Start the run in its folder, or install its "
                "package."
            ) from error
        raise ConfigError(
            f"import_path {path!r}: module {module!r} is there, but importing it failed: "
            f"{type(error).__name__}: {error}. Fix it."
        ) from error
    finally:
        sys.path.remove(here)


def _suggest(name: str, known: Iterable[str], what: str) -> str:
    known = list(known)
    if close := difflib.get_close_matches(name, known, n=1):
        return f"Did you mean {close[0]!r}?"
    return f"{what}: {', '.join(known) or 'none'}."
