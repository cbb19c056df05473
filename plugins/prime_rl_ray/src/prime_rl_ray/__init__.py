"""Ray: ``prime-rl run CONFIG.toml --launcher ray`` puts a run's processes on a Ray cluster.

    tasks -> placement groups (cluster.py) -> one agent per task (agent.py) -> its child process
    servers of environments -> the same; Ray replaces an agent that dies, and the agent its child

Ray only places and watches processes. Rollouts, batches and weights do not go through Ray. This
module does not import ray.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import NonNegativeInt, PositiveFloat

from prime_rl import Launcher, Place, PluginConfig, Process, ProcessCommand, Task, hookimpl

if TYPE_CHECKING:
    from prime_rl_env_workers.placed import EnvServer
    from prime_rl_ray.cluster import Cluster


LOOPBACK = "127.0.0.1:"


class RayConfig(PluginConfig):
    """``[launcher] type = "ray"``."""

    address: str | None = None
    """``HOST:PORT`` of the cluster. None: ``$RAY_ADDRESS``, else the cluster that this machine
    belongs to. The launcher starts no cluster."""
    strategy: Literal["PACK", "SPREAD"] = "PACK"
    """Ray's placement strategy for tasks that need no separate node: few nodes, or many."""
    timeout: PositiveFloat = 600.0
    """Seconds to wait until the cluster has room for the run. It may have to grow first."""
    env_servers: NonNegativeInt | Literal["auto"] = "auto"
    """Actors that run the workers of each env, which they share; at most one per worker. Each takes
    a CPU per worker. 0: the workers are beside the orchestrator. ``auto``: on a cluster of several
    nodes, one on each node for an env whose ``env_workers`` is ``auto``; else 0."""
    forward_env: tuple[str, ...] = ()
    """Environment variables to forward to the processes, besides those that begin with PRIME_RL_,
    HF_, WANDB_, VLLM_, NCCL_, GLOO_ or TORCH_. Variables whose name says key or token go to
    orchestrator and model maker only, unless they are named here."""


class RayLauncher(Launcher):
    """One Ray actor per process: it reports its address, starts the process and waits for it."""

    name = "ray"
    config_class = RayConfig
    config: RayConfig

    def __init__(self, config: PluginConfig) -> None:
        super().__init__(config)
        self._connected: Cluster | None = None
        self._env_servers: list[EnvServer] | None = None

    @property
    def _cluster(self) -> Cluster:
        if self._connected is None:
            if (self.config.address or "").startswith(LOOPBACK):
                # Otherwise Ray replaces loopback by the machine's address, where nothing listens.
                os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
            from prime_rl_ray.cluster import Cluster

            self._connected = Cluster(self.config)
        return self._connected

    def num_gpus(self) -> int:
        """See ``Launcher.num_gpus``."""
        return self._cluster.num_gpus()

    def place(
        self, tasks: Sequence[Task], run_dir: Path, tell: Callable[[str], None]
    ) -> Mapping[str, Place]:
        """See ``Launcher.place``."""
        with_orchestrator = any(task.part == "orchestrator" for task in tasks)
        if with_orchestrator and self._env_servers is None:
            self._env_servers = self._servers(tasks, run_dir)
        servers = self._env_servers if with_orchestrator else None
        return self._cluster.place(tasks, tell, servers or ())

    def _servers(self, tasks: Sequence[Task], run_dir: Path) -> list[EnvServer]:
        """Those of environments. Their number stays for the run, though its servers take CPUs."""
        wanted = self.config.env_servers
        nodes = self._cluster.spare_cpus(tasks) if wanted else []
        if wanted == 0 or (wanted == "auto" and len(nodes) < 2):
            return []
        from prime_rl_env_workers.placed import automatic_shares, servers_of

        most = len(nodes) if wanted == "auto" else wanted
        automatic = automatic_shares(run_dir, nodes[:most])
        return servers_of(run_dir, 0 if wanted == "auto" else wanted, automatic)

    def start(self, task: Task, command: ProcessCommand) -> Process:
        """See ``Launcher.start``. Servers of environments start with the orchestrator."""
        if task.part == "orchestrator" and self._env_servers:
            from prime_rl_env_workers.placed import orchestrator_environment

            for server in self._env_servers:
                self._cluster.keep(server, command)
            more = orchestrator_environment(self._env_servers)
            command = replace(command, env={**command.env, **more})
        return self._cluster.start(task, command)

    def end(self, processes: Sequence[Process]) -> None:
        """See ``Launcher.end``."""
        if self._connected is not None:
            self._connected.end(processes)

    def close(self) -> None:
        """See ``Launcher.close``."""
        if self._connected is not None:
            self._connected.close()


@hookimpl
def register_launchers() -> list[type[Launcher]]:
    return [RayLauncher]
