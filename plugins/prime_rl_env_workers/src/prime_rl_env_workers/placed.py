"""Servers of environments that a launcher places on other machines, and keeps alive.

    launcher      ``servers_of`` a run -> a command each, and the orchestrator's environment
    each server   writes to its file where it listens (``prime-rl serve-env --announce FILE``)
    orchestrator  reads the files: each worker's address, which changes when a server is replaced

A file holds ``{"addresses": [...]}`` while its server listens, ``{"failed": "why"}`` if it cannot
start, and is missing in between. It is in the run directory, which every machine sees.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from prime_rl.config.orchestrator import EvalEnvConfig, SourceConfig
from prime_rl.config.run import RunConfig
from prime_rl.errors import RunError
from prime_rl.rundir.attempts import PROCESS
from prime_rl.rundir.launch import ADMIN_KEY
from prime_rl.rundir.status import replace_text

SERVERS = "PRIME_RL_ENV_SERVERS"
"""Environment variable of the orchestrator: the files of each env's servers, as JSON."""

Find = Callable[[], str | None]
"""The address at which a worker listens now; None: nowhere. Raises ``RunError``: it never will."""


@dataclass(frozen=True)
class EnvServer:
    """A server of one env, for a launcher to start."""

    name: str
    """Of its log and its file."""
    env: str
    """``train/LABEL`` or ``eval/LABEL``."""
    num_workers: int
    argv: Sequence[str]
    """Its command. To be added: ``--host ADDRESS``, at which the orchestrator reaches it."""
    file: Path

    def environment(self, orchestrator: Mapping[str, str]) -> dict[str, str]:
        """Of its process: the orchestrator's with the engines' sampling key, without the key of
        their admin routes."""
        own = {name: value for name, value in orchestrator.items() if name != ADMIN_KEY}
        attempt, _, rest = own.get(PROCESS, "::").partition(":")
        return own | {PROCESS: f"{attempt}:{self.name}:{rest.partition(':')[2]}"}


def servers_of(run_dir: Path, each: int) -> list[EnvServer]:
    """``each`` servers, and at most one per worker, for every env of a run whose ``env_workers`` is
    a number. Raises ``RunError`` if there is no such env."""
    source = run_dir.absolute() / "configs" / "run.json"
    config = RunConfig.model_validate_json(source.read_bytes())
    orchestrator, found = config.orchestrator, list[EnvServer]()
    envs: list[tuple[str, SourceConfig]] = []
    envs += [(f"env_train_{number}", env) for number, env in enumerate(orchestrator.train.env)]
    envs += [(f"env_eval_{number}", env) for number, env in enumerate(orchestrator.eval.env)]
    for start, env in envs:
        workers = orchestrator.env_workers if env.env_workers is None else env.env_workers
        if workers == "auto" or env.address:
            continue
        for server in range(servers := min(each, workers)):
            name = f"{start}_{server}"
            share, file = len(range(server, workers, servers)), source.with_name(f"{name}.json")
            argv = [sys.executable, "-P", "-m", "prime_rl", "serve-env", str(source)]
            argv += ["--env", key_of(env), "--workers", str(share)]
            argv += ["--port", "0", "--announce", str(file)]
            found.append(EnvServer(name, key_of(env), share, argv, file))
    if not found:
        raise RunError(
            "servers of environments are to be placed, and no env has a number of workers for "
            f"them: orchestrator.env_workers is {orchestrator.env_workers!r}. Set it to a number."
        )
    return found


def orchestrator_environment(servers: Sequence[EnvServer]) -> dict[str, str]:
    """What tells the orchestrator that its workers are placed."""
    files: dict[str, list[str]] = {}
    for server in servers:
        files.setdefault(server.env, []).append(str(server.file))
    return {SERVERS: json.dumps(files)}


def key_of(env: SourceConfig) -> str:
    """``train/LABEL`` or ``eval/LABEL``: envs of both kinds may have the same label."""
    return f"{'eval' if isinstance(env, EvalEnvConfig) else 'train'}/{env.label}"


def placed_workers(env: SourceConfig, number: int) -> list[Find]:
    """Each of the env's workers, if a launcher has placed them; empty: it has not."""
    files = json.loads(os.environ.get(SERVERS, "{}")).get(key_of(env), [])
    return list(_finders([Path(file) for file in files], number)) if files else []


def _finders(files: Sequence[Path], number: int) -> Iterator[Find]:
    """Worker n is with server n % servers."""
    for worker in range(number):
        index, server = divmod(worker, len(files))
        yield lambda file=files[server], index=index: _read(file, index)  # type: ignore[misc]


def _read(file: Path, index: int) -> str | None:
    try:
        found = json.loads(file.read_text())
    except FileNotFoundError:
        return None
    if "failed" in found:
        raise RunError(found["failed"])
    address: str = found["addresses"][index]
    return address


def announce(file: Path, addresses: Sequence[str]) -> None:
    """Write where a server's workers listen."""
    replace_text(file, json.dumps({"addresses": [*addresses]}))


def give_up(file: Path, reason: str) -> None:
    """Write that a server cannot start; the run ends with the reason."""
    replace_text(file, json.dumps({"failed": reason}))
