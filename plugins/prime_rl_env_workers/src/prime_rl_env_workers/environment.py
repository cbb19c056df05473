"""An ``Environment`` whose episodes run in workers, and the choice of how many there are."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from pydantic_core import to_jsonable_python

from prime_rl.config.contract import FrozenModel
from prime_rl.config.orchestrator import EnvConfig, SourceConfig
from prime_rl.config.run import RunConfig
from prime_rl.env.environment import Environment
from prime_rl.env.episode import EnvSettings, Example
from prime_rl.rundir.launch import ENGINE_KEY, ENV_SERVER_KEY
from prime_rl.rundir.status import Status
from prime_rl_env_workers.forks import WorkerForks
from prime_rl_env_workers.placed import (
    MOST_WORKERS,
    Find,
    key_bytes,
    placed_key,
    placed_number,
    placed_workers,
)
from prime_rl_env_workers.pool import GIB, Pool, WorkerLimits

if TYPE_CHECKING:
    from verifiers.v1 import Episode, ModelContext

STATUS = "env_workers"
"""Name of the status with the state of each worker."""
TRUSTED = "RUNS_IN_PROCESS"
"""Attribute of a taskset's or a harness's class: it is quick, and ends no process."""


def make_environment(
    settings: EnvSettings, env: SourceConfig, config: RunConfig, run_dir: Path
) -> Environment:
    """The environment of one table of the config, with workers or without. Raises ``ConfigError``
    as ``Environment``."""
    made = WorkerEnvironment(settings)
    wanted = config.orchestrator.env_workers if env.env_workers is None else env.env_workers
    number = placed_number(env) or automatic_number(made, config) if wanted == "auto" else wanted
    if number or env.address:
        made.add_workers(number, env, config, shared_by(run_dir, config.plugins.disabled))
    return made


class WorkerParts:
    """What the envs of one run share: the fork server and the status."""

    def __init__(
        self,
        run_dir: Path | None,
        disabled: Sequence[str] = (),
        tell: Callable[[str], None] | None = None,
    ) -> None:
        """``run_dir``: None without a run; then ``tell`` gets the state. ``disabled``:
        ``plugins.disabled``."""
        self.forks = WorkerForks(disabled)
        self._status = Status(None if run_dir is None else run_dir / "status" / f"{STATUS}.json")
        self._tell = tell
        self._pools: list[Pool] = []

    async def enter(self, pool: Pool) -> None:
        self._pools.append(pool)
        pool.on_change = self.report
        await pool.start()

    async def leave(self, pool: Pool) -> None:
        """Close a pool. The last one ends the fork server."""
        await pool.close()
        self._pools.remove(pool)
        if not self._pools:
            await self.forks.close()

    def report(self) -> None:
        """Write the state of each env's workers."""
        details: dict[str, Any] = {f"env {p.label}": p.describe() for p in self._pools}
        workers = [worker for pool in self._pools for worker in pool.workers]
        ready = sum(worker is not None and worker.ready for worker in workers)
        late = [p.label for p in self._pools if not any(w and w.ready for w in p.workers)]
        if self._tell is not None:
            self._tell(", ".join(f"{name}: {text}" for name, text in details.items()))
        self._status.report(
            f"{ready} of {len(workers)} ready",
            waiting_for=f"workers of {', '.join(late)}" if late else None,
            **details,
        )


@cache
def shared_by(run_dir: Path, disabled: tuple[str, ...] = ()) -> WorkerParts:
    """The one of a run."""
    return WorkerParts(run_dir, disabled)


class WorkerEnvironment(Environment):
    """Its examples are here, its episodes in workers, if it has any."""

    pool: Pool | None = None
    _shared: WorkerParts

    def add_workers(
        self,
        number: int,
        env: SourceConfig,
        config: RunConfig,
        shared: WorkerParts,
        serve_at: Sequence[str] = (),
    ) -> None:
        """Run the episodes in ``number`` workers, which a launcher may have placed, or at
        ``env.address``. ``serve_at``: the address at which each worker listens; empty: an address
        that only this process can reach."""
        table = config.orchestrator.workers
        memory = table.max_memory * GIB if table.max_memory else total_memory() / 2 / (number or 1)
        limits = WorkerLimits(
            table.hang_timeout,
            memory,
            timeout=None if self.settings.engines_sleep else self.settings.timeout,
            start_timeout=table.start_timeout,
            max_episodes=self.max_episodes,
        )
        keys = {*table.pass_env, *named_keys(self._env.config.model_dump(mode="json"))}
        keys |= {*config.env_vars, *config.orchestrator.env_vars}
        keys |= {ENGINE_KEY, *source_keys(env, config)}
        request = {
            "settings": to_wire(self.settings),
            "env": {name: os.environ[name] for name in sorted(keys) if name in os.environ},
        }
        self._shared = shared
        servers: list[Find] = [lambda address=address: address for address in env.address]  # type: ignore[misc]
        placed = [] if servers or serve_at else placed_workers(env, number)
        text = placed_key(os.environ) if placed else os.environ.get(ENV_SERVER_KEY, "")
        has_ports = bool(servers or placed or serve_at)
        key = key_bytes(text) if text and has_ports else None
        servers = servers or placed
        label = self.settings.label
        forks = shared.forks
        self.pool = Pool(
            label,
            number,
            limits=limits,
            request=request,
            forks=forks,
            servers=servers,
            serve_at=serve_at,
            key=key,
        )

    async def __aenter__(self) -> Environment:
        """Begin to start the workers; they import verifiers while the engines load the model."""
        if self.pool is None:
            return await super().__aenter__()
        await self._shared.enter(self.pool)
        return self

    async def __aexit__(self, *error: object) -> None:
        if self.pool is not None:
            await self._shared.leave(self.pool)
        await super().__aexit__(*error)

    async def _episode(self, example: Example, context: ModelContext) -> Episode:
        if self.pool is None:
            return await super()._episode(example, context)
        data = example.task.data.model_dump(mode="json")
        asleep = self.settings.engines_sleep
        held = self.awake.limit(self.settings.timeout) if asleep else None
        episode: Episode = await self.pool.run(context, data, held)
        return episode

    def take_metrics(self) -> Mapping[str, float]:
        if self.pool is None:
            return {}
        start = f"workers/{self.settings.label}"
        return {f"{start}/{name}": value for name, value in self.pool.metrics().items()}


def to_wire(settings: EnvSettings) -> dict[str, Any]:
    """The settings as JSON, for ``server.from_wire``."""
    fields: dict[str, Any] = to_jsonable_python(vars(settings))
    return fields


def automatic_number(environment: Environment, config: RunConfig) -> int:
    """The rule of ``env_workers = "auto"``: none if taskset and harnesses say that they are quick
    and trusted, else half of the cores, shared by the training envs."""
    if is_trusted(environment):
        return 0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    each = (cores or 1) // 2 // max(1, len(config.orchestrator.train.env))
    return min(MOST_WORKERS, max(1, each))


def is_trusted(environment: Environment) -> bool:
    """Whether taskset and harnesses say that they are quick, and end no process."""
    env = environment._env
    return all(getattr(each, TRUSTED, False) for each in (env.taskset, *env._harnesses.values()))


def source_keys(env: SourceConfig, config: RunConfig) -> Iterator[str]:
    """The variables with keys and headers of the model that an env samples from."""
    yield from config.inference.headers_from_env.values()
    if isinstance(env, EnvConfig):
        source = (env.algo or config.orchestrator.algo).sampling.source
        if isinstance(source, FrozenModel):
            yield from source.key_vars
            yield from source.headers_from_env.values()


def named_keys(config: Any) -> Iterator[str]:
    """Environment variables that an env's config names: keys of its judges and fixed agents, and
    what its harness hands on."""
    if isinstance(config, dict):
        for name, value in config.items():
            if name == "api_key_var" and isinstance(value, str):
                yield value
            elif name in ("api_key_var", "forward_env") and isinstance(value, list):
                yield from map(str, value)
            elif name == "headers_from_env" and isinstance(value, dict):
                yield from map(str, value.values())
            else:
                yield from named_keys(value)
    elif isinstance(config, list):
        for value in config:
            yield from named_keys(value)


def total_memory() -> float:
    """Bytes of this machine, or of our control group."""
    least = float(psutil.virtual_memory().total)
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):
            least = min(least, float((Path("/sys/fs/cgroup") / name).read_text("utf-8")))
    return least
