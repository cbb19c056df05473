"""The whole TOML of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from prime_rl.config.base import HostName, PluginTable, Settings, VariableName, Variables
from prime_rl.config.inference import InferenceConfig
from prime_rl.config.orchestrator import OrchestratorConfig
from prime_rl.config.removed import without_removed
from prime_rl.config.trainer import TrainerConfig

FILES = "filesystem"

GpuList = Annotated[tuple[NonNegativeInt, ...], Field(min_length=1)]


class ModelConfig(PluginTable):
    """``[model]``: the policy. Other keys belong to the model maker, if ``name`` names one."""

    name: str
    """A Hugging Face folder or id, or the name of a model that an installed plugin makes here."""


class TransportConfig(Settings):
    """``[rollout_transport]``: how micro batches reach the trainer."""

    type: Literal["zmq", "filesystem"] = "filesystem"
    """``filesystem``: as files in the run directory. ``zmq``: over sockets, the default of
    ``prime-rl``."""
    host: HostName = "127.0.0.1"
    """Address the orchestrator binds and the trainer connects to."""
    port: int | None = Field(default=None, ge=1, le=65535)
    """None: a free port is chosen."""


class WeightBroadcastConfig(PluginTable):
    """``[weight_broadcast]``: how new weights reach the engines. Its other keys belong to the
    weight transport."""

    type: str = FILES
    """``filesystem``: as files in the run directory. Or an installed weight transport (``nccl``,
    ``gloo``, ``ipc``): from memory to memory, with files only for checkpoints, after the last step,
    and for an engine that restarts. If the key is open and engine and trainer share one GPU,
    installed packages may choose ``ipc`` (entry points ``prime_rl.fits``)."""
    timeout: PositiveFloat = 120.0
    """With a weight transport: seconds until all engines must have joined, and per message."""

    @property
    def as_files(self) -> bool:
        """Whether no weight transport takes part."""
        return self.type == FILES

    @model_validator(mode="after")
    def _no_settings_of_files(self) -> WeightBroadcastConfig:
        if self.as_files and self.settings:
            tables = ", ".join(sorted(self.settings))
            raise ValueError(f"unknown key {tables}; type 'filesystem' takes no other settings")
        return self


class LauncherConfig(PluginTable):
    """``[launcher]``: starts the processes of a run. Its other keys belong to the launcher."""

    type: str = "local"
    """Name of an installed launcher. ``prime-rl run --launcher NAME`` sets it too."""


class DeploymentConfig(Settings):
    """``[deployment]``: GPUs of engines and trainer, and machines of the trainer. If no key names
    GPUs, installed packages may divide those of this machine (entry points ``prime_rl.fits``)."""

    colocated: bool = False
    """Engine and trainer share the same GPUs and take turns in their memory."""
    inference_gpus: GpuList | None = None
    """GPU numbers of the engines, among those in ``CUDA_VISIBLE_DEVICES``. Replicas get equal
    shares, in order. None: all GPUs that the trainer does not use."""
    trainer_gpus: GpuList | None = None
    """GPU numbers of the trainer, one per rank. None: as many of the last GPUs as
    ``trainer.num_ranks``, or one; with ``inference_gpus``, or engines elsewhere, all that are
    left."""
    trainer_nodes: PositiveInt = 1
    """Machines the trainer's ranks are spread over; the launcher must support that many."""
    pass_env: tuple[VariableName, ...] = ()
    """More environment variables that engines and trainer inherit. They get paths, locale, proxies
    and the settings of their libraries (``CUDA_``, ``NCCL_``, ``TORCH_``, ``VLLM_``, ``HF_`` ...),
    and nothing that is called a key, token, secret or password."""


class CkptConfig(Settings):
    """``[ckpt]``: checkpoints, from which a run goes on after a failure and with ``--resume``, in
    ``<run>/checkpoints``. A run also writes one when it ends: after its last step, or after the
    step at which it is stopped."""

    enabled: bool = True
    """False: no checkpoints; a stopped run cannot be resumed, one that fails starts again."""
    interval: PositiveInt | None = None
    """Steps between checkpoints. None: ``seconds`` decides."""
    seconds: PositiveFloat = 600.0
    """Time between checkpoints, without ``interval``."""
    keep_last: PositiveInt | None = None
    """Number of newest checkpoints to keep. None: the newest two, and all that ``interval``
    makes."""
    keep_interval: PositiveInt | None = None
    """Checkpoints of every multiple of this step stay, in addition to ``keep_last``."""
    best: str | None = None
    """A held-out metric, ``eval/ENV/NAME``: the checkpoint with its highest value stays too, and
    ``checkpoints/best`` links to it. Needs ``interval``, and an evaluation at its multiples. An
    evaluation that lacks it is skipped with a warning."""

    @model_validator(mode="after")
    def _best_is_a_checkpoint(self) -> CkptConfig:
        if self.best is not None and not self.enabled:
            raise ValueError(
                "best keeps the best checkpoint, and enabled is false, so there is none. Leave one "
                "of them out."
            )
        return self

    def is_due(self, step: int, last_step: int, since: float = 0.0) -> bool:
        """Whether step ``step`` of a run that ends with ``last_step`` writes a checkpoint;
        ``since``: seconds after the one before."""
        late = self.interval is None and since >= self.seconds
        return self.enabled and (step == last_step or self._is_regular(step) or late)

    def superseded(self, steps: list[int]) -> list[int]:
        """The ``steps`` whose checkpoints can be deleted. The newest never can."""
        older = sorted(steps)[: -(self.keep_last or 2)]
        every = self.keep_interval
        passing = [n for n in older if every is None or n % every]
        return [n for n in passing if self.keep_last is not None or not self._is_regular(n)]

    def _is_regular(self, step: int) -> bool:
        return self.interval is not None and step % self.interval == 0


class RecoveryConfig(Settings):
    """``[recovery]``: if trainer or orchestrator dies, is stopped or hangs, both start again from
    the newest checkpoint, or from the beginning. Engines have limits of their own."""

    max_restarts: NonNegativeInt = 5
    """Restarts in a row without a new step. The same error twice at a step ends the run too."""
    hang_timeout: PositiveFloat = 1800.0
    """Seconds that orchestrator or trainer may give no sign of life: longer than one row takes,
    compiling included. Reading and writing files is a sign of life."""
    stopped_timeout: PositiveFloat = 60.0
    """Seconds that a process on this machine may be stopped (SIGSTOP)."""
    lost_timeout: PositiveFloat = 60.0
    """Seconds that weights may be gone which the trainer has announced and no engine has loaded."""


class StopConfig(Settings):
    """``[stop]``: end the run early, as Ctrl-C would, by a held-out metric; higher is better."""

    metric: str | None = None
    """``eval/ENV/NAME``, of an evaluation between steps. None: the run takes all its steps."""
    patience: PositiveInt = 3
    """Evaluations in a row without a new best value, after which the run ends."""
    reach: float | None = None
    """End the run as soon as the metric has this value. None: only by ``patience``."""


class ViewConfig(PluginTable):
    """``[view]``: shows the run to the user who started it. Its other keys belong to the view."""

    type: str = "lines"
    """Name of an installed view. ``lines`` prints a line when a process reports another state."""


class RunDirConfig(Settings):
    """``[run]``"""

    name: Annotated[str, Field(pattern=r"^[\w][\w.+=@ -]*$")] | None = None
    """Name of the run directory, not a path. None: environments, model and a free number."""


class PluginsConfig(Settings):
    """``[plugins]``"""

    disabled: tuple[str, ...] = ()
    """Installed plugins that this run does not load, by the name of their entry point or of their
    distribution."""


class LogConfig(Settings):
    """``[log]``"""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest severity that is logged."""
    json_logging: bool = False
    """Each line is a JSON object with ``time``, ``level``, ``process``, ``logger``, ``message``
    and, for an error, ``exception``. What other libraries print (vLLM, a traceback of Python) stays
    text."""
    max_mib: PositiveFloat = 64.0
    """Size of a process's log; of a longer one, the beginning and the end are kept."""


class ModelSource(Settings):
    """The keys that say which model is loaded, and how it is made if a plugin makes it."""

    model: ModelConfig
    plugins: PluginsConfig = PluginsConfig()
    seed: NonNegativeInt = Field(default=0, lt=2**63)
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
    """One table per monitor, by the name an installed plugin offers."""
    observers: dict[str, dict[str, Any]] = {}
    """Settings of observers, one table per name. Every installed observer takes part in the run."""
    ckpt: CkptConfig = CkptConfig()
    """Checkpoints to resume from. None (runs of version 0.1) means ``enabled = false``."""
    recovery: RecoveryConfig = RecoveryConfig()
    stop: StopConfig = StopConfig()
    log: LogConfig = LogConfig()
    view: ViewConfig = ViewConfig()
    run: RunDirConfig = RunDirConfig()
    seq_len: PositiveInt = 2048
    """Longest sample, in tokens; default of the engine's context and of a packed row."""
    max_steps: PositiveInt
    """Steps to take: batches to train."""
    output_dir: str = "outputs"
    """Folder of the run directories."""
    env_vars: Variables = {}
    """Environment variables of every process of the run; ``trainer.env_vars``,
    ``orchestrator.env_vars`` and ``inference.env_vars`` come before them. No secrets: this is
    written to the run directory (``deployment.pass_env`` passes those of the shell)."""

    @model_validator(mode="before")
    @classmethod
    def _without_removed(cls, table: object) -> object:
        return without_removed(table) if isinstance(table, Mapping) else table

    @field_validator("ckpt", mode="before")
    @classmethod
    def _none_disables(cls, value: object) -> object:
        return {"enabled": False} if value is None else value

    @property
    def has_engines(self) -> bool:
        """Whether an engine serves the policy: one of the run, or one elsewhere."""
        return self.inference.base_url is not None or self.inference.replicas > 0

    @property
    def row_tokens(self) -> int:
        """Capacity of one packed row."""
        return self.trainer.micro_batch_tokens or self.seq_len
