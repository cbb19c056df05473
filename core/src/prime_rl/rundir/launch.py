"""Facts that the supervisor passes to the processes beyond the config: paths, ports, sizes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec

from prime_rl.errors import RunError
from prime_rl.rundir.checkpoints import Checkpoint
from prime_rl.rundir.rows import read_table
from prime_rl.rundir.status import names_seen, replace_text

PAST = "past"
"""The engine of earlier versions, among ``Launch.reference_urls``."""


class Launch(msgspec.Struct, kw_only=True, frozen=True):
    """Facts of one launch, in ``<run>/configs/launch.json``. Secrets use the environment."""

    model_path: str
    """A Hugging Face folder or id."""
    wait_for_model: bool = False
    """The model is still being written: wait for the file ``.ready`` in its folder."""
    initial_path: str = ""
    """The folder with the policy's first weights if the launch resumes and something reads them;
    empty: ``model_path``."""
    reference_urls: dict[str, str] = {}
    """Engines of the run that serve them (``initial``), the average of the weights (``ema``) and
    earlier versions (``past``)."""
    served_model_name: str
    engine_urls: list[str]
    """Base URLs of the policy's engines, without ``/v1``. The supervisor rewrites this file when
    engines join or leave."""
    engine_names: list[str] = []
    """Their processes, in the same order; empty: they run elsewhere."""
    transport_type: str
    transport_host: str
    transport_ports: list[int]
    """One per trainer rank."""
    transport_hwm: int = 4
    first_step: int = 1
    num_ranks: int = 1
    """Ranks of the trainer, over all nodes."""
    trainer_nodes: int = 1
    rendezvous: str = ""
    """``HOST:PORT`` of the process group's store, on the trainer's first node."""
    trainer_addresses: list[str] = []
    """Address of each trainer node, as the other nodes reach it."""
    engines_kept: bool = False
    """The engines run already, and have weights of an earlier attempt."""
    resume_from: str | None = None
    """The checkpoint of step ``first_step - 1``; None: the run starts from the beginning."""

    @property
    def initial(self) -> Path:
        """The folder with the policy's first weights."""
        return Path(self.initial_path or self.model_path)

    @property
    def checkpoint(self) -> Checkpoint | None:
        """The checkpoint that this launch resumes from."""
        return None if self.resume_from is None else Checkpoint(Path(self.resume_from))

    @property
    def adapter(self) -> Path | None:
        """The adapter that this launch resumes, on the base ``model_path``; None if
        ``model_path`` is the whole policy."""
        checkpoint = self.checkpoint
        return checkpoint.weights if checkpoint and checkpoint.is_adapter else None

    @property
    def first_weights(self) -> Path:
        """The folder of the model or adapter that the launch starts from. Its version is
        ``first_step - 1``."""
        return self.adapter or Path(self.model_path)

    @property
    def engine_version(self) -> int:
        """The policy version of an engine that has loaded ``model_path``. A base without its
        adapter is the policy that the run began with."""
        return 0 if self.adapter else self.first_step - 1

    def write(self, run_dir: Path) -> None:
        text = msgspec.json.format(msgspec.json.encode(self), indent=2).decode()
        replace_text(run_dir / "configs" / "launch.json", text)

    @classmethod
    def read(cls, run_dir: Path) -> Launch:
        """Raises ``RunError`` if the file is missing or damaged."""
        path = run_dir / "configs" / "launch.json"
        try:
            launch: Launch = read_table(path, cls)
        except FileNotFoundError as error:
            raise RunError(f"{path} cannot be read: it does not exist") from error
        return launch


READY = ".ready"
"""Marker file in a model folder that is complete."""

ADMIN_KEY = "PRIME_RL_ADMIN_KEY"
"""Environment variable that carries the run's key for the engines' admin routes."""

ENGINE_KEY = "PRIME_RL_ENGINE_API_KEY"
"""Environment variable with the bearer key of the engines' sampling routes; unset means none."""

ENV_SERVER_KEY = "PRIME_RL_ENV_SERVER_KEY"
"""Environment variable with the key of ``prime-rl serve-env``, which its machine and the
orchestrator's share."""

NODE_ADDRESS = "PRIME_RL_NODE_ADDRESS"
"""Environment variable with the address of the trainer node."""

STORE = "PRIME_RL_RANKS_STORE"
"""Environment variable: the file through which the trainer's ranks of one machine connect."""

PARENT_PID = "PRIME_RL_PARENT_PID"
"""Environment variable with the parent's process id: a child ends with that process."""


async def wait_for_model(path: Path, poll: float = 0.05) -> None:
    """Return when the model folder is complete."""
    while READY not in names_seen(path):
        await asyncio.sleep(poll)
