"""``[trainer]``: how the weights are updated."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from prime_rl.config.base import Settings
from prime_rl.plugins.errors import ConfigError


class OptimConfig(Settings):
    """``[trainer.optim]``: AdamW and gradient clipping."""

    type: Literal["adamw"] = "adamw"
    """The optimizer."""
    lr: PositiveFloat = 1e-6
    """Peak learning rate."""
    weight_decay: NonNegativeFloat = 0.01
    """Decoupled: times the learning rate, off the weights each step."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay of the gradient's running mean."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """Decay of the squared gradient's running mean."""
    eps: PositiveFloat = 1e-8
    """Added to the root of the squared gradient's mean."""
    max_norm: PositiveFloat | None = 1.0
    """Clip the global gradient norm to this. None: no clipping."""


class SchedulerConfig(Settings):
    """``[trainer.scheduler]``: the learning rate over steps."""

    type: Literal["constant", "linear", "cosine"] = "constant"
    """``linear`` warms up, holds and decays (WSD); ``cosine`` warms up and decays to ``max_steps``.
    """
    warmup_steps: NonNegativeInt = 0
    """Steps over which the rate rises to ``optim.lr``."""
    decay_steps: NonNegativeInt | None = None
    """Steps of the final decay of ``linear``. None: everything after warm-up."""
    min_lr: NonNegativeFloat = 0.0
    """The rate at the end of the decay."""

    def num_decay_steps(self, max_steps: int) -> int:
        """How many steps the final decay takes."""
        if self.type == "constant":
            return 0
        if self.type == "cosine" or self.decay_steps is None:
            return max(0, max_steps - self.warmup_steps)
        return self.decay_steps

    def check(self, peak: float, max_steps: int) -> None:
        """Raises ``ConfigError`` if it does not fit into a run of ``max_steps`` at rate
        ``peak``."""
        warmup, decay = self.warmup_steps, self.num_decay_steps(max_steps)
        if warmup + decay > max_steps:
            raise ConfigError(
                f"trainer.scheduler: warmup_steps {warmup} and decay_steps {decay} "
                f"take {warmup + decay} steps, max_steps is {max_steps}. Shorten one of them."
            )
        if self.min_lr > peak:
            raise ConfigError(
                f"trainer.scheduler.min_lr is {self.min_lr}, expected at most optim.lr {peak}"
            )


NormalizeBy: TypeAlias = Literal["tokens", "env"]


class LossConfig(Settings):
    """``[trainer.loss]``: the loss of the rl component. Its other keys belong to the loss
    plugin."""

    model_config = Settings.model_config | {"extra": "allow"}

    type: str = "default"
    """Name of an installed loss."""
    normalize_by: NormalizeBy = "tokens"
    """What each component's sum is divided by. ``tokens``: its trained tokens in the batch.
    ``env``: each env's part by that env's own, so that no env dilutes another."""

    @property
    def settings(self) -> dict[str, Any]:
        """The keys the loss plugin validates."""
        return dict(self.model_extra or {})


class TokenExportConfig(Settings):
    """``[trainer.token_export]``: every trained token with its streams, logprobs and mask reasons,
    in ``<run>/token_exports``."""

    enabled: bool = False
    """Write them. It takes time and disk: some hundred bytes a token as JSON."""
    format: Literal["jsonl", "parquet"] = "jsonl"
    """``parquet`` needs pyarrow: ``pip install "prime-rl-core[parquet]"``."""
    interval: PositiveInt = 1
    """Every how many steps."""

    @model_validator(mode="after")
    def _needs_pyarrow(self) -> TokenExportConfig:
        if self.enabled and self.format == "parquet" and find_spec("pyarrow") is None:
            raise ConfigError(
                'format is "parquet", but pyarrow is not installed. Install it '
                '(pip install "prime-rl-core[parquet]") or set format = "jsonl".'
            )
        return self


class TrainerConfig(Settings):
    """``[trainer]``"""

    optim: OptimConfig = OptimConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    loss: LossConfig = LossConfig()
    token_export: TokenExportConfig = TokenExportConfig()
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of compute. Weights and optimizer state stay in float32: steps of a usual size
    would
    vanish in bfloat16's rounding."""
    micro_batch_tokens: PositiveInt | None = None
    """Capacity of one packed row, in tokens. None: ``seq_len``."""
    attention: Literal["auto", "varlen", "mask"] = "auto"
    """How documents of a packed row are kept apart: ``varlen`` computes each document by itself,
    ``mask`` builds a dense block mask. ``auto`` takes the faster one for the device."""
    share_prompts: bool = True
    """Compute a prompt that several rollouts of a row start from once: the same numbers for less
    work. On CPU, with ``varlen`` attention."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """``auto`` takes CUDA if there is one."""
    keep_broadcasts: Annotated[int, Field(ge=2)] = 2
    """How many published weight versions stay on disk; an engine may still be loading the last but
    one."""
    max_bad_steps: PositiveInt = 3
    """Steps in a row that may be skipped because their loss or gradient is not finite; then the run
    ends."""
