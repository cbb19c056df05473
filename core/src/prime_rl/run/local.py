"""The launcher ``local``: every process is a child of this one."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, cast

from prime_rl.plugins.base import PluginConfig
from prime_rl.plugins.launchers import Launcher, Place, Process, ProcessCommand, Task
from prime_rl.run.children import Child, end, free_ports, start
from prime_rl.run.gpus import VISIBLE, visible_gpus


class LocalLauncher(Launcher):
    """``[launcher] type = "local"``: children of ``prime-rl run``, on loopback."""

    name = "local"
    is_remote: ClassVar[bool] = False

    def __init__(self, config: PluginConfig) -> None:
        super().__init__(config)
        self._children: dict[str, Child] = {}

    def num_gpus(self) -> int:
        """See ``Launcher.num_gpus``: the visible GPUs of this machine."""
        return len(visible_gpus())

    def place(
        self, tasks: Sequence[Task], run_dir: Path, tell: Callable[[str], None]
    ) -> Mapping[str, Place]:
        """See ``Launcher.place``: this machine, with free ports for each task."""
        ports = iter(free_ports(sum(task.num_ports for task in tasks)))
        return {
            task.name: Place(None, tuple(next(ports) for _ in range(task.num_ports)))
            for task in tasks
        }

    def start(self, task: Task, command: ProcessCommand) -> Process:
        """See ``Launcher.start``. Processes that a dead engine left behind hold its GPU memory, so
        they are ended first."""
        if task.name in self._children:
            end([self._children[task.name]])
        env = dict(command.env)
        if task.gpus is not None:
            devices = visible_gpus()
            env[VISIBLE] = ",".join(devices[number] for number in task.gpus)
            if VISIBLE not in os.environ:  # nvidia-smi orders by bus, CUDA by speed
                env["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
        self._children[task.name] = start(task.name, command.argv, env, command.log)
        return self._children[task.name]

    def end(self, processes: Sequence[Process]) -> None:
        """See ``Launcher.end``."""
        end(cast(Sequence[Child], processes))
