"""The launcher ``local``: every process on this machine, as a child of this one."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, cast

from prime_rl.plugins.launchers import Launcher, Place, Process, ProcessCommand, Task
from prime_rl.run.children import Child, end, free_ports, start
from prime_rl.run.gpus import VISIBLE, visible_gpus


class LocalLauncher(Launcher):
    """``[launcher] type = "local"``: children of ``prime-rl run``, on loopback."""

    name = "local"
    is_remote: ClassVar[bool] = False

    def num_gpus(self) -> int:
        """See ``Launcher.num_gpus``: those that ``nvidia-smi`` counts and CUDA_VISIBLE_DEVICES
        leaves."""
        return len(visible_gpus())

    def place(
        self, tasks: Sequence[Task], run_dir: Path, tell: Callable[[str], None]
    ) -> Mapping[str, Place]:
        """See ``Launcher.place``: here, each with free ports of its own."""
        ports = iter(free_ports(sum(task.num_ports for task in tasks)))
        return {
            task.name: Place(None, tuple(next(ports) for _ in range(task.num_ports)))
            for task in tasks
        }

    def start(self, task: Task, command: ProcessCommand) -> Process:
        """See ``Launcher.start``."""
        env = dict(command.env)
        if task.gpus is not None:
            devices = visible_gpus()
            env[VISIBLE] = ",".join(devices[number] for number in task.gpus)
            if VISIBLE not in os.environ:  # nvidia-smi counts along the bus, CUDA by speed
                env["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
        return start(task.name, command.argv, env, command.log)

    def end(self, processes: Sequence[Process]) -> None:
        """See ``Launcher.end``."""
        end(cast(Sequence[Child], processes))
