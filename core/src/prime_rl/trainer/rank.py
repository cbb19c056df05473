"""Which of the trainer's ranks a process is. Importing this brings in no torch."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass

from prime_rl.errors import ConfigError

FAILED = 1
FOLLOWED = 3
ENDED = 128 + signal.SIGTERM
"""Exit codes of a rank: it failed; it failed after another rank had; it was asked to end."""


@dataclass(frozen=True)
class Rank:
    """A process among the ``size`` ranks of the trainer."""

    number: int = 0
    size: int = 1
    local: int = 0
    """Number among the ranks of its machine, and of its GPU there."""

    @classmethod
    def of_process(cls) -> Rank:
        """As torchrun, or our agent, sets it in the environment."""
        return cls(
            number=int(os.environ.get("RANK") or 0),
            size=int(os.environ.get("WORLD_SIZE") or 1),
            local=int(os.environ.get("LOCAL_RANK") or 0),
        )

    def check(self, num_ranks: int) -> None:
        """Raises ``ConfigError`` unless the launch expects as many ranks."""
        if self.size != num_ranks:
            raise ConfigError(
                f"the trainer was started with {self.size} ranks, configs/launch.json says "
                f"{num_ranks}. Give its agent --ranks {num_ranks}."
            )
