"""From an import path in the TOML to a function, and where modules that a config names may be.

One rule for all processes of a run: a module is installed or in a folder of ``PYTHONPATH``; that of
an import path may also be in the working directory. The folder of a script, and the working
directory of ``python -m``, are on the path of one process only.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from prime_rl.errors import ConfigError, line_in


def import_function(
    path: str, kwargs: Mapping[str, Any] | None = None, first: str = ""
) -> Callable[..., Any]:
    """The function of an import path in the TOML, to be called as ``fn(<first>, **kwargs)``.
    Without ``kwargs`` the caller checks how it may be called.

    ``module.function``, ``module:function`` or ``path/to/file.py:function``; modules of the working
    directory are found too. Raises ``ConfigError`` if it does not exist, or cannot be called like
    that.
    """
    if path.endswith(".py"):
        raise ConfigError(
            f"import_path: got {path!r}, expected a function. Name it: '{path}:FUNCTION'"
        )

    module_name, _, attribute = path.rpartition(":") if ":" in path else path.rpartition(".")
    is_file = ":" in path and module_name.endswith(".py")
    names = attribute.split(".") if is_file else [*module_name.split("."), *attribute.split(".")]
    if not all(name.isidentifier() for name in names):
        raise ConfigError(
            f"import_path: got {path!r}, expected 'module.function', 'module:function' or "
            "'path/to/file.py:function'"
        )

    member = _import_file(path, module_name) if is_file else _import(path, module_name)
    for part in attribute.split("."):
        if not hasattr(member, part):
            functions = [n for n, each in vars(member).items() if inspect.isroutine(each)]
            close = difflib.get_close_matches(part, functions, n=1)
            hint = f"Functions there: {', '.join(functions) or 'none'}."
            if close:
                hint = f"Did you mean {close[0]!r}?"

            raise ConfigError(
                f"import_path {path!r}: module {module_name!r} has no {attribute!r}, expected a "
                f"function of that name. {hint}"
            )

        member = getattr(member, part)

    if not callable(member):
        raise ConfigError(
            f"import_path {path!r}: found a {type(member).__name__}, expected a function. Name the "
            "function itself."
        )

    if kwargs is not None:
        _check_call(member, path, kwargs=kwargs, first=first)
    return member  # type: ignore[no-any-return]


def folder_only_here(module: str) -> Path | None:
    """Where a top-level module is that this process can import and the processes of a run cannot;
    None: they can, or this process cannot either.

    A fresh interpreter is asked, because editable installs add finders and a script may change its
    own path.
    A module that is in no folder of the path comes from a finder that a plugin has added, and the
    plugin adds it in every process.
    """
    spec = None if sys.flags.safe_path else PathFinder.find_spec(module)
    if spec is None or _in_children(module, os.getcwd(), os.environ.get("PYTHONPATH", "")):
        return None
    return _folder(spec)


def _folder(spec: ModuleSpec) -> Path:
    """The folder that has to be on the path."""
    places = [*(spec.submodule_search_locations or ())] or [spec.origin or ""]
    return Path(places[0]).absolute().parent


@cache
def _in_children(module: str, here: str, path: str) -> bool:
    """Whether the processes of a run find it."""
    # `here` and `path` are for the cache: the answer depends on both.
    code = "import importlib.util as u, sys; sys.exit(u.find_spec(sys.argv[1]) is None)"
    done = subprocess.run([sys.executable, "-P", "-c", code, module], capture_output=True)
    return done.returncode == 0


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

    try:
        signature.bind(None, **kwargs)
    except TypeError as error:
        raise ConfigError(
            f"import_path {path!r}: the function has the signature {signature}, and the call "
            f"fn({first}, **kwargs) does not fit it: {error}. Change kwargs, or the function."
        ) from error


def _import(path: str, module: str) -> Any:
    here = os.getcwd()
    top = module.partition(".")[0]
    folder = folder_only_here(top) if top not in sys.modules else None
    if folder is not None and folder != Path(here):
        raise ConfigError(
            f"import_path {path!r}: module {top!r} is in {folder}, which is on the path of this "
            "process only: the processes of a run search what is installed, PYTHONPATH and the "
            f"working directory {here}. Start the run in its folder, set PYTHONPATH={folder}, or "
            "install its package."
        )

    sys.path.append(here)  # last: its files must not replace installed modules
    # The file may be newer than what Python remembers of its folder.
    importlib.invalidate_caches()

    try:
        return importlib.import_module(module)
    except Exception as error:
        absent = error.name if isinstance(error, ModuleNotFoundError) else None
        # The missing module is this one or a parent package, not something that it imports.
        if absent is not None and f"{module}.".startswith(f"{absent}."):
            raise ConfigError(
                f"import_path {path!r}: there is no module {absent!r}, neither installed nor in "
                f"the working directory {here}. Start the run in its folder, or install its "
                "package."
            ) from error

        raise ConfigError(
            f"import_path {path!r}: module {module!r} is there, but importing it failed: "
            f"{type(error).__name__}: {str(error).removesuffix('.')}"
            f"{line_in(error, module.partition('.')[0])}. Fix it."
        ) from error
    finally:
        # The last entry is removed: the folder may have been on the path before.
        del sys.path[-1 - sys.path[::-1].index(here)]


@cache
def _import_file(path: str, name: str) -> ModuleType:
    file = Path(name).expanduser()
    if not file.is_file():
        raise ConfigError(
            f"import_path {path!r}: there is no file {file} (working directory {os.getcwd()})"
        )

    spec = spec_from_file_location(file.stem, file.resolve())
    assert spec is not None and spec.loader is not None  # it ends in .py
    module = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ConfigError(
            f"import_path {path!r}: importing {file} failed: {type(error).__name__}: {error}"
            f"{line_in(error, file.stem)}. Fix it, or install what it imports."
        ) from error

    return module
