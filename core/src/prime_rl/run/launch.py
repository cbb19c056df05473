"""What the supervisor tells the processes it starts, beyond the config: paths, ports, sizes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec

from prime_rl.adapter import is_adapter
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
    """Of the trainer, over all its nodes."""
    trainer_nodes: int = 1
    rendezvous: str = ""
    """``HOST:PORT`` on the trainer's first node, where ranks of several nodes meet."""
    trainer_addresses: list[str] = []
    """Of the trainer's nodes: where the ranks of one are reached by those of the others."""
    resume_from: str | None = None
    """The checkpoint of step ``first_step - 1``; None: from the beginning."""

    @property
    def checkpoint(self) -> Checkpoint | None:
        """What this launch goes on from."""
        return None if self.resume_from is None else Checkpoint(Path(self.resume_from))

    @property
    def adapter(self) -> Path | None:
        """The adapter that this launch goes on with, on the base ``model_path``; None if
        ``model_path`` is the whole policy."""
        checkpoint = self.checkpoint
        found = checkpoint is not None and is_adapter(checkpoint.weights)
        return checkpoint.weights if checkpoint is not None and found else None

    @property
    def first_weights(self) -> Path:
        """The policy that the launch starts from, as an engine loads it: a model's or an adapter's
        folder. Its version is ``first_step - 1``."""
        return self.adapter or Path(self.model_path)

    @property
    def engine_version(self) -> int:
        """The policy version that engines have when they have loaded ``model_path``. A base without
        its adapter is the policy that the run began with."""
        return 0 if self.adapter else self.first_step - 1

    def began_with(self, run_dir: Path) -> int:
        """The policy version that the first attempt at this run began with: 0, or that of another
        run's checkpoint."""
        attempts = {
            int(number): path
            for path in run_dir.glob("configs/launch.attempt_*.json")
            if (number := path.stem.rpartition("_")[2]).isdecimal()
        }
        if not attempts:
            return self.first_step - 1
        first = msgspec.json.decode(attempts[min(attempts)].read_bytes(), type=dict[str, Any])
        return int(first.get("first_step", 1)) - 1

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

NODE_ADDRESS = "PRIME_RL_NODE_ADDRESS"
"""Environment variable by which a trainer node learns its own address."""

PARENT_PID = "PRIME_RL_PARENT_PID"
"""Environment variable by which a child learns whose death is its own."""


async def wait_for_model(path: Path, poll: float = 0.05) -> None:
    """Until the model folder is complete."""
    while not (path / READY).exists():
        await asyncio.sleep(poll)
