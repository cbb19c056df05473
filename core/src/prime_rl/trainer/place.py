"""Which of the trainer's ranks a process is. Importing this brings in no torch."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass

from prime_rl.errors import ConfigError

STORE = "PRIME_RL_RANKS_STORE"
"""Environment variable with the file through which the ranks of one machine find one another."""

FAILED, FOLLOWED, ENDED = 1, 3, 128 + signal.SIGTERM
"""Exit codes of a rank: it failed; it failed because another had, or after it; it was asked to
end."""


@dataclass(frozen=True)
class Place:
    """Which of the ranks a process is."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    """Among the ranks of its machine: which GPU is its own."""

    @classmethod
    def of_process(cls) -> Place:
        """What torchrun, or our agent, has said in the environment."""
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
        rank, size, local = (os.environ.get(name) for name in names)
        return cls(int(rank or 0), int(size or 1), int(local or 0))

    def check(self, num_ranks: int) -> None:
        """Raises ``ConfigError`` unless as many were started as the launch says."""
        if self.size != num_ranks:
            raise ConfigError(
                f"the trainer was started with {self.size} ranks, configs/launch.json says "
                f"{num_ranks}. Start it by: python -m prime_rl.trainer.agent RUN_DIR --ranks "
                f"{num_ranks}"
            )
