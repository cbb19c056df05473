"""Servers of environments that a launcher places on other machines, and keeps alive.

    launcher      ``servers_of`` a run -> a command each, and the orchestrator's environment
    each server   writes to its file where it listens (``prime-rl serve-env --announce FILE``)
    orchestrator  reads the files: each worker's address, which changes when a server is replaced

A file holds ``{"addresses": [...]}`` while its server listens, ``{"failed": "why"}`` if it cannot
start, and is missing in between. It is in the run directory, which every machine sees.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import msgspec

from prime_rl.config.orchestrator import EvalEnvConfig, SourceConfig
from prime_rl.config.run import RunConfig
from prime_rl.errors import ConfigError, RunError
from prime_rl.rundir.attempts import PROCESS
from prime_rl.rundir.directory import read_config
from prime_rl.rundir.launch import ADMIN_KEY, ENV_SERVER_KEY
from prime_rl.rundir.polls import poll_failed, poll_succeeded
from prime_rl.rundir.rows import read_table
from prime_rl.rundir.status import replace_text

SERVERS = "PRIME_RL_ENV_SERVERS"
"""Environment variable of the orchestrator: by env the files of its servers, with the number of
workers of each, as JSON."""
SHORTEST_KEY = 16
MAKE_KEY = "python -c 'import secrets; print(secrets.token_hex(32))'"
MOST_WORKERS = 16
"""Most workers of one env on one machine, where the config says ``auto``."""

Find = Callable[[], str | None]
"""The address at which a worker listens now; None: nowhere. Raises ``RunError``: it never will."""


@dataclass(frozen=True)
class EnvServer:
    """A server of one env, for a launcher to start."""

    name: str
    """The name of its log and its file."""
    env: str
    """``train/LABEL`` or ``eval/LABEL``."""
    num_workers: int
    argv: Sequence[str]
    """Its command. To be added: ``--host ADDRESS``, at which the orchestrator reaches it."""
    file: Path

    def environment(self, orchestrator: Mapping[str, str]) -> dict[str, str]:
        """The environment of its process: the orchestrator's, with the engines' sampling key and
        the key of the server, without the key of the engines' admin routes."""
        variables = {name: value for name, value in orchestrator.items() if name != ADMIN_KEY}
        variables[ENV_SERVER_KEY] = placed_key(orchestrator)
        attempt, _, rest = variables.get(PROCESS, "::").partition(":")
        return variables | {PROCESS: f"{attempt}:{self.name}:{rest.partition(':')[2]}"}


def placed_key(orchestrator: Mapping[str, str]) -> str:
    """The text for ``ENV_SERVER_KEY`` of the servers that a launcher places: from the run's admin
    key, which they do not get."""
    admin = orchestrator.get(ADMIN_KEY, "")
    return hmac.digest(admin.encode(), b"environment servers", "sha256").hex()


def key_bytes(text: str) -> bytes:
    """What both ends of a connection derive from a key. Raises ``ConfigError`` if it is short."""
    if len(text) < SHORTEST_KEY:
        raise ConfigError(
            f"{ENV_SERVER_KEY}: expected at least {SHORTEST_KEY} characters, found {len(text)}. "
            f"Make a key: {MAKE_KEY}"
        )
    return hashlib.sha256(text.encode()).digest()


def servers_of(
    run_dir: Path, each: int, automatic: Mapping[str, Sequence[int]] = MappingProxyType({})
) -> list[EnvServer]:
    """The servers of a run's envs: ``each``, and at most one per worker, where ``env_workers`` is a
    number. ``automatic``: by env whose ``env_workers`` is ``auto``, the workers of each server
    (``automatic_shares``). Raises ``RunError`` if ``each`` asks for servers and no env has
    workers."""
    config = _config(run_dir)
    env_servers = list[EnvServer]()
    source = _source(run_dir)
    for start, env in _envs(config):
        workers = _wanted(config, env)
        if env.address:
            continue
        if isinstance(workers, int):
            servers = min(each, workers)
            shares = [len(range(server, workers, servers)) for server in range(servers)]
        else:
            shares = [*automatic.get(key_of(env), ())]

        for server, share in enumerate(shares):
            name = f"{start}_{server}"
            file = source.with_name(f"{name}.json")
            argv = [sys.executable, "-P", "-m", "prime_rl", "serve-env", str(source)]
            argv += ["--env", key_of(env), "--workers", str(share)]
            argv += ["--port", "0", "--announce", str(file)]
            env_servers.append(
                EnvServer(name, key_of(env), num_workers=share, argv=argv, file=file)
            )

    if each and not env_servers:
        raise RunError(
            "servers of environments are to be placed, and no env has workers for them: "
            f"orchestrator.env_workers is {config.orchestrator.env_workers!r}, which for 'auto' "
            "means that the env runs in the orchestrator. Set it to a number. An env with an agent "
            'of model = "past" is never placed.'
        )

    return env_servers


def automatic_shares(run_dir: Path, cpus: Sequence[int]) -> dict[str, list[int]]:
    """For each env whose ``env_workers`` is ``auto``, unless it is declared quick and trusted: the
    workers of its servers, one server per machine. ``cpus``: of each machine, how many workers it
    may have. Raises ``RunError`` if an env cannot be made."""
    config = _config(run_dir)
    asked = [e for _, e in _envs(config) if not e.address and _wanted(config, e) == "auto"]
    if not asked or not any(cpus):
        return {}
    keys = {key_of(env) for env in asked} & _not_trusted(run_dir)
    most = [min(MOST_WORKERS, each // len(keys)) for each in cpus] if keys else []
    shares = [each for each in most if each]
    # Equal ones: worker n is with server n % servers.
    return {key: [min(shares)] * len(shares) for key in keys if shares}


def _not_trusted(run_dir: Path) -> set[str]:
    """Envs of the config that need workers, found in a process of its own: it imports them."""
    command = [sys.executable, "-P", "-m", "prime_rl_env_workers.trust", str(run_dir)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        said = done.stderr.strip().splitlines()[-1:] or ["no message"]
        raise RunError(f"cannot find out which environments need workers: {said[0]}")
    return set(json.loads(done.stdout.splitlines()[-1]))


def _source(run_dir: Path) -> Path:
    return run_dir.absolute() / "configs" / "run.json"


def _config(run_dir: Path) -> RunConfig:
    return read_config(run_dir)


def _envs(config: RunConfig) -> Iterator[tuple[str, SourceConfig]]:
    """Those that can be placed, with the beginning of their servers' names."""
    for number, train in enumerate(config.orchestrator.train.env):
        # A server does not know the engine of earlier versions: the orchestrator's own workers do.
        if not train.past_agents:
            yield f"env_train_{number}", train
    for number, evaluation in enumerate(config.orchestrator.eval.env):
        yield f"env_eval_{number}", evaluation


def _wanted(config: RunConfig, env: SourceConfig) -> int | Literal["auto"]:
    return config.orchestrator.env_workers if env.env_workers is None else env.env_workers


def orchestrator_environment(servers: Sequence[EnvServer]) -> dict[str, str]:
    """The signal that tells the orchestrator that its workers are placed."""
    files: dict[str, dict[str, int]] = {}
    for server in servers:
        files.setdefault(server.env, {})[str(server.file)] = server.num_workers
    return {SERVERS: json.dumps(files)}


def key_of(env: SourceConfig) -> str:
    """``train/LABEL`` or ``eval/LABEL``: envs of both kinds may have the same label."""
    return f"{'eval' if isinstance(env, EvalEnvConfig) else 'train'}/{env.label}"


def placed_workers(env: SourceConfig, number: int) -> list[Find]:
    """Each of the env's workers, if a launcher has placed them; empty: it has not."""
    files = _placed(env)
    return list(_finders([Path(file) for file in files], number)) if files else []


def placed_number(env: SourceConfig) -> int:
    """How many workers a launcher has placed for the env."""
    return sum(_placed(env).values())


def _placed(env: SourceConfig) -> dict[str, int]:
    """The workers of each server, by its file."""
    workers: dict[str, int] = json.loads(os.environ.get(SERVERS, "{}")).get(key_of(env), {})
    return workers


def _finders(files: Sequence[Path], number: int) -> Iterator[Find]:
    """Worker n is with server n % servers."""
    for worker in range(number):
        index, server = divmod(worker, len(files))
        yield _Finder(files[server], index)


class _Finder:
    """The address of one worker of a server: the last one while the file cannot be read."""

    def __init__(self, file: Path, index: int) -> None:
        self._file = file
        self._index = index
        self._last: str | None = None

    def __call__(self) -> str | None:
        try:
            self._last = _read(self._file, self._index)
        except RunError as error:
            if not isinstance(error.__cause__, OSError):
                raise
            poll_failed(self._file, error)
        else:
            poll_succeeded(self._file)
        return self._last


def _read(file: Path, index: int) -> str | None:
    try:
        announced: _Announced = read_table(file, _Announced)
    except FileNotFoundError:
        return None
    if announced.failed is not None:
        raise RunError(announced.failed)
    if index >= len(announced.addresses):
        number = len(announced.addresses)
        raise RunError(f"{file}: expected the address of worker {index}, found {number} addresses")
    return announced.addresses[index]


class _Announced(msgspec.Struct):
    """What a server writes once it listens, or cannot."""

    addresses: list[str] = []
    failed: str | None = None


def announce(file: Path, addresses: Sequence[str]) -> None:
    """Write where a server's workers listen."""
    replace_text(file, json.dumps({"addresses": [*addresses]}))


def give_up(file: Path, reason: str) -> None:
    """Write that a server cannot start; the run ends with the reason."""
    replace_text(file, json.dumps({"failed": reason}))
