"""Ray: ``prime-rl run CONFIG.toml --launcher ray`` puts a run's processes on a Ray cluster.

    tasks -> placement groups (cluster.py) -> one agent a task (agent.py) -> the process, its child

Ray places and watches. Rollouts, batches and weights go their own ways, none of them through Ray.
This module only says what is offered; it imports no ray.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import PositiveFloat

from prime_rl import Launcher, Place, PluginConfig, Process, ProcessCommand, Task, hookimpl

if TYPE_CHECKING:
    from prime_rl_ray.cluster import Cluster


LOOPBACK = "127.0.0.1:"


class RayConfig(PluginConfig):
    """``[launcher] type = "ray"``."""

    address: str | None = None
    """Of the cluster: ``HOST:PORT``. None: ``$RAY_ADDRESS``, else the cluster that this machine is
    a node of. None is started."""
    strategy: Literal["PACK", "SPREAD"] = "PACK"
    """Whether what is not told apart goes on few nodes or on many; Ray's words."""
    timeout: PositiveFloat = 600.0
    """Seconds to wait until the cluster has room for the run: it may have to grow first."""
    forward_env: tuple[str, ...] = ()
    """Environment variables that the processes get from here, beside those that begin with
    PRIME_RL_, HF_, WANDB_, VLLM_ or NCCL_."""


class RayLauncher(Launcher):
    """One Ray actor a process: it says where it is, starts the process and waits for its end."""

    name = "ray"
    config_class = RayConfig
    config: RayConfig

    def __init__(self, config: PluginConfig) -> None:
        super().__init__(config)
        self._connected: Cluster | None = None

    @property
    def _cluster(self) -> Cluster:
        if self._connected is None:
            if (self.config.address or "").startswith(LOOPBACK):
                # Else Ray takes loopback for the machine's own address, where nobody listens.
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
        return self._cluster.place(tasks, tell)

    def start(self, task: Task, command: ProcessCommand) -> Process:
        """See ``Launcher.start``."""
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
    """Offer ``ray``."""
    return [RayLauncher]
