"""What the supervisor tells the processes it starts, beyond the config: paths, ports, sizes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec

from prime_rl.run.checkpoints import Checkpoint


class Launch(msgspec.Struct, kw_only=True, frozen=True):
    """Facts of one launch; ``<run>/configs/launch.json``. Secrets go by the environment instead."""

    model_path: str
    """A Hugging Face folder or id."""
    wait_for_model: bool = False
    """The folder is still being made: wait for the file ``.ready`` in it."""
    served_model_name: str
    engine_urls: list[str]
    """Base URLs of the engines, without ``/v1``."""
    transport_type: str
    transport_host: str
    transport_ports: list[int]
    """One a trainer rank."""
    transport_hwm: int = 4
    first_step: int = 1
    num_ranks: int = 1
    resume_from: str | None = None
    """The checkpoint of step ``first_step - 1``; None: from the beginning."""

    @property
    def checkpoint(self) -> Checkpoint | None:
        """What this launch goes on from."""
        return None if self.resume_from is None else Checkpoint(Path(self.resume_from))

    def write(self, run_dir: Path) -> None:
        """Save it in the run directory."""
        (run_dir / "configs" / "launch.json").write_bytes(
            msgspec.json.format(msgspec.json.encode(self), indent=2)
        )

    @classmethod
    def read(cls, run_dir: Path) -> Launch:
        """Load what ``write`` saved."""
        return msgspec.json.decode((run_dir / "configs" / "launch.json").read_bytes(), type=cls)


READY = ".ready"
"""Marker file in a model folder that is complete."""

ADMIN_KEY = "PRIME_RL_ADMIN_KEY"
"""Environment variable that carries the run's key for the engines' admin routes."""

ENGINE_KEY = "PRIME_RL_ENGINE_API_KEY"
"""Environment variable with the bearer key of the engines' sampling routes; unset means none."""

PARENT_PID = "PRIME_RL_PARENT_PID"
"""Environment variable by which a child learns whose death is its own."""


async def wait_for_model(path: Path, poll: float = 0.05) -> None:
    """Until the model folder is complete."""
    while not (path / READY).exists():
        await asyncio.sleep(poll)
