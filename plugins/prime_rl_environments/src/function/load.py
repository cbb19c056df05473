"""From the args of an env to its reward functions. Imports no verifiers."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from function.rewards import RewardFunction, reward_functions
from function.travel import unpacked
from prime_rl import ConfigError

EXPECTED = "expected 'module.function', 'module:function' or 'path/to/file.py:function'"


@cache
def load_functions(paths: tuple[str, ...], file: str | None) -> tuple[RewardFunction, ...]:
    """The reward functions of an env: by import paths, or from the file that a script has written.
    Raises ``ConfigError``."""
    if (file is None) == (not paths):
        raise ConfigError(
            "reward: set the import path of a reward function, such as reward = 'my_rewards.exact'"
        )
    functions = unpacked(Path(file)) if file is not None else [function_at(each) for each in paths]
    return tuple(reward_functions(functions))


def function_at(path: str) -> Any:
    """The function at an import path; a module may lie in the working folder. Raises
    ``ConfigError``."""
    where = f"reward {path!r}"
    module_name, _, attribute = path.partition(":") if ":" in path else path.rpartition(".")
    if not module_name or not attribute:
        raise ConfigError(f"{where}: {EXPECTED}")
    module = _module(module_name, where)

    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            functions = [name for name, each in vars(module).items() if inspect.isroutine(each)]
            close = difflib.get_close_matches(part, functions, n=1)
            there = f"Functions there: {', '.join(functions) or 'none'}."
            raise ConfigError(
                f"{where}: {module_name} has no {attribute!r}. "
                f"{f'Did you mean {close[0]!r}?' if close else there}"
            )
        found = getattr(found, part)
    return found


def _module(name: str, where: str) -> ModuleType:
    if name.endswith(".py"):
        return _module_of_file(Path(name).expanduser(), where)
    if not all(part.isidentifier() for part in name.split(".")):
        raise ConfigError(f"{where}: {EXPECTED}")
    here = Path.cwd()
    sys.path.append(str(here))  # last: its files must not replace installed modules
    importlib.invalidate_caches()
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise _broken(name, where, error) from error
        raise ConfigError(
            f"{where}: there is no module {error.name!r}, neither installed nor in the working "
            f"folder {here}. Start the run in its folder, or write 'path/to/file.py:function'."
        ) from error
    except Exception as error:
        raise _broken(name, where, error) from error
    finally:
        del sys.path[-1 - sys.path[::-1].index(str(here))]  # ours: the last one


@cache
def _module_of_file(path: Path, where: str) -> ModuleType:
    if not path.is_file():
        raise ConfigError(f"{where}: there is no file {path} (working folder {Path.cwd()})")
    spec = importlib.util.spec_from_file_location(path.stem, path.resolve())
    if spec is None or spec.loader is None:
        raise ConfigError(f"{where}: {path} is no module of Python")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise _broken(str(path), where, error) from error
    return module


def _broken(name: str, where: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"{where}: importing {name} failed: {type(error).__name__}: {error}. What it imports must "
        "be installed, or lie in the working folder."
    )


def as_paths(reward: str | Sequence[str] | None) -> tuple[str, ...]:
    if reward is None:
        return ()
    return (reward,) if isinstance(reward, str) else tuple(reward)
