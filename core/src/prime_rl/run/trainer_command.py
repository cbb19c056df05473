"""How the trainer is started: one process, the agent of several ranks, or torchrun on every node.

By hand, on each of two machines, once ``configs/launch.json`` is there::

    python -m prime_rl.trainer.agent RUN_DIR --ranks 16 --nodes 2 --endpoint trainer-0:29500
"""

from __future__ import annotations

import sys
from pathlib import Path

from prime_rl.run.launch import Launch

TRAINER, AGENT = "prime_rl.trainer", "prime_rl.trainer.agent"
"""The modules that are one rank, and that start several."""


def trainer_command(launch: Launch, run_dir: Path) -> list[str]:
    """The argument list of one trainer node: the same on all of them."""
    if launch.num_ranks == 1:
        return [sys.executable, "-m", TRAINER, str(run_dir)]
    command = [sys.executable, "-m", AGENT, str(run_dir), "--ranks", str(launch.num_ranks)]
    if launch.trainer_nodes > 1:
        command += ["--nodes", str(launch.trainer_nodes), "--endpoint", launch.rendezvous]
        command += ["--id", run_dir.name]
    return command
