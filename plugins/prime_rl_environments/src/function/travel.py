"""Functions of a script or a notebook on their way to the run's other processes.

This is the one place that unpickles, and it unpickles only what the process that started the run
has written: the bytes are sealed with a key (HMAC-SHA256) that is in the environment of the run's
processes and in no file. A file that another process wrote or changed is refused unread.
"""

from __future__ import annotations

import hashlib
import hmac
import importlib.machinery
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from prime_rl import ConfigError

KEY = "PRIME_RL_FUNCTIONS_KEY"
"""Environment variable with the key, new for each process that starts runs."""
SEAL = hashlib.sha256().digest_size
LARGEST = 256 << 20
"""Bytes of the functions and of what they refer to."""


def make_key() -> None:
    """Have a key in this process's environment, which the run's processes inherit."""
    os.environ.setdefault(KEY, secrets.token_urlsafe(32))


def seal(data: bytes, key: str) -> bytes:
    return hmac.digest(key.encode(), data, "sha256") + data


def unseal(sealed: bytes, key: str | None, where: str) -> bytes:
    """Raises ``ConfigError`` unless ``seal`` made it with this key."""
    if not key:
        raise ConfigError(
            f"{where}: these functions came from a script or a notebook, and the key that they "
            f"were sealed with ({KEY}) has ended with it. Call prime_rl.train again with prompts "
            "and reward; resume='latest' continues the run."
        )
    data = sealed[SEAL:]
    if not hmac.compare_digest(sealed[:SEAL], hmac.digest(key.encode(), data, "sha256")):
        raise ConfigError(
            f"{where}: the functions in it were not sealed with the key of this run, or the file "
            "has changed: they are not read. Call prime_rl.train again with prompts and reward."
        )
    return data


def packed(functions: Sequence[Any]) -> bytes:
    """The functions and what they refer to, sealed. Raises ``ConfigError`` that names the function
    that cannot travel."""
    import cloudpickle  # type: ignore[import-untyped]  # has no types

    make_key()
    with _by_value(_only_here()):
        for number, function in enumerate(functions):
            try:
                cloudpickle.dumps(function)
            except Exception as error:
                name = getattr(function, "__name__", type(function).__name__)
                raise ConfigError(
                    f"reward[{number}] ({name}): it cannot travel to the environments' processes: "
                    f"{type(error).__name__}: {error}. A lock, an open file or a connection cannot "
                    "be copied: create it inside the function, or put the function into a module "
                    "and name it: reward='my_rewards.exact'."
                ) from error
        data = cloudpickle.dumps(list(functions))
    if len(data) > LARGEST:
        raise ConfigError(
            f"reward: the functions and what they refer to have {len(data):,} bytes, at most "
            f"{LARGEST:,} travel. Load large data inside the function, from a file."
        )
    return seal(data, os.environ[KEY])


def unpacked(file: Path) -> list[Any]:
    """The functions of a file that ``packed`` gave. Raises ``ConfigError``."""
    where = f"functions: {file}"
    try:
        sealed = file.read_bytes()
    except OSError as error:
        raise ConfigError(f"{where} cannot be read: {error.strerror}") from error
    data = unseal(sealed, os.environ.get(KEY), where)
    import cloudpickle

    try:
        functions: list[Any] = cloudpickle.loads(data)
    except Exception as error:
        raise ConfigError(
            f"{where}: the functions cannot be loaded here: {type(error).__name__}: {error}. What "
            "they import must be installed for the run's processes too."
        ) from error
    return functions


@cache
def _fresh_path() -> tuple[str, ...]:
    """Where a fresh interpreter, such as a process of the run, finds modules."""
    command = [sys.executable, "-P", "-c", "import sys; print(*sys.path, sep='\\n')"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return tuple(filter(None, done.stdout.splitlines()))


def _only_here() -> dict[str, Any]:
    """The loaded modules that the run's processes would not find: those beside the script, or in a
    folder that it added to ``sys.path``."""
    fresh = _fresh_path()
    extra = {os.path.abspath(folder) for folder in sys.path} - {os.path.abspath(f) for f in fresh}
    here: dict[str, Any] = {}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if not file or name == "__main__" or getattr(module, "__name__", name) != name:
            continue
        top = name.partition(".")[0]
        depth = name.count(".") + (os.path.basename(file) == "__init__.py")
        folder = os.path.abspath(file)
        for _ in range(depth + 1):
            folder = os.path.dirname(folder)
        if folder not in extra:
            continue
        if importlib.machinery.PathFinder.find_spec(top, [*fresh]) is None:
            here[name] = module
    return here


@contextmanager
def _by_value(modules: Mapping[str, Any]) -> Iterator[None]:
    import cloudpickle

    already = set(cloudpickle.list_registry_pickle_by_value())
    added = [module for name, module in modules.items() if name not in already]
    for module in added:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in added:
            cloudpickle.unregister_pickle_by_value(module)
