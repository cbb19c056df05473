"""The whole TOML of a run."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, field_validator

from prime_rl.config.base import Settings
from prime_rl.config.broadcast import WeightBroadcastConfig
from prime_rl.config.ckpt import CkptConfig
from prime_rl.config.deployment import DeploymentConfig
from prime_rl.config.inference import InferenceConfig
from prime_rl.config.launcher import LauncherConfig
from prime_rl.config.orchestrator import OrchestratorConfig
from prime_rl.config.trainer import TrainerConfig


class ModelConfig(Settings):
    """``[model]``: the policy. Other keys belong to the model maker, if ``name`` names one."""

    model_config = Settings.model_config | {"extra": "allow"}

    name: str
    """A Hugging Face folder or id, or the name of a model that an installed plugin makes here."""

    @property
    def settings(self) -> dict[str, Any]:
        """The keys the model maker validates."""
        return dict(self.model_extra or {})


class TransportConfig(Settings):
    """``[rollout_transport]``: how micro batches reach the trainer."""

    type: Literal["zmq", "filesystem"] = "zmq"
    """Sockets, or files in the run directory."""
    host: str = "127.0.0.1"
    """Address the orchestrator binds and the trainer connects to."""
    port: int | None = Field(default=None, ge=1, le=65535)
    """None: a free port is chosen."""
    hwm: PositiveInt = 4
    """Batches that may wait for a slow trainer before the orchestrator waits too."""


class RunDirConfig(Settings):
    """``[run]``"""

    name: Annotated[str, Field(pattern=r"^[\w][\w.+=@ -]*$")] | None = None
    """Name of the run directory, no path. None: environments, model and a number that is free."""


class PluginsConfig(Settings):
    """``[plugins]``"""

    disabled: tuple[str, ...] = ()
    """Entry-point names of installed plugins that this run leaves out."""


class LogConfig(Settings):
    """``[log]``"""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe records that go to the logs."""


class ModelSource(Settings):
    """The keys that say which model is loaded, and how it is made if a plugin makes it."""

    model: ModelConfig
    plugins: PluginsConfig = PluginsConfig()
    seed: NonNegativeInt = 0
    """Seeds model making, the sampler and the engine."""


class RunConfig(ModelSource):
    """The whole TOML. Tables compose left to right over several files."""

    orchestrator: OrchestratorConfig = OrchestratorConfig()
    trainer: TrainerConfig = TrainerConfig()
    inference: InferenceConfig = InferenceConfig()
    deployment: DeploymentConfig = DeploymentConfig()
    launcher: LauncherConfig = LauncherConfig()
    rollout_transport: TransportConfig = TransportConfig()
    weight_broadcast: WeightBroadcastConfig = WeightBroadcastConfig()
    monitors: dict[str, dict[str, Any]] = {}
    """One table a monitor, by the name an installed plugin offers. ``file`` is always there."""
    ckpt: CkptConfig = CkptConfig()
    """Checkpoints to resume from. None, as in runs of version 0.1, is ``enabled = false``."""
    log: LogConfig = LogConfig()
    run: RunDirConfig = RunDirConfig()
    seq_len: PositiveInt = 2048
    """Longest sample, in tokens; also the default of the engine's context and of a packed row."""
    max_steps: PositiveInt
    """Optimizer steps to take."""
    output_dir: str = "outputs"
    """Run directories are made in here."""

    @field_validator("ckpt", mode="before")
    @classmethod
    def _none_disables(cls, value: object) -> object:
        return {"enabled": False} if value is None else value

    @property
    def row_tokens(self) -> int:
        """Capacity of one packed row."""
        return self.trainer.micro_batch_tokens or self.seq_len
