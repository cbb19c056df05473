"""``[trainer]``: optimizer, loss, precision and ranks."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from prime_rl.config.base import PluginTable, Settings
from prime_rl.errors import ConfigError


class OptimConfig(PluginTable):
    """``[trainer.optim]``: optimizer and gradient clipping. Its other keys belong to the
    optimizer."""

    type: str = "adamw"
    """Name of an installed optimizer. Heads train with AdamW, whatever it is."""
    lr: PositiveFloat = 1e-6
    """Peak learning rate."""
    weight_decay: NonNegativeFloat = 0.01
    """Decoupled: each step subtracts this times the learning rate times the weights."""
    max_norm: PositiveFloat | None = 1.0
    """Clip the global gradient norm to this. None: no clipping."""


class SchedulerConfig(Settings):
    """``[trainer.scheduler]``: the learning rate over steps."""

    type: Literal["constant", "linear", "cosine"] = "constant"
    """``linear`` warms up, holds and decays (WSD); ``cosine`` warms up and decays to the end."""
    warmup_steps: NonNegativeInt = 0
    """Steps until the rate reaches ``optim.lr``."""
    decay_steps: NonNegativeInt | None = None
    """Steps of the final decay of ``linear``. None: all after warm-up."""
    min_lr: NonNegativeFloat = 0.0
    """The rate at the end of the decay."""

    def num_decay_steps(self, max_steps: int) -> int:
        """Steps of the final decay."""
        if self.type == "constant":
            return 0
        if self.type == "cosine" or self.decay_steps is None:
            return max(0, max_steps - self.warmup_steps)
        return self.decay_steps

    def fitted(self, max_steps: int) -> SchedulerConfig:
        """Shortened if it does not fit: warm-up and decay keep their ratio. A decay without a
        number of steps gets as many as the warm-up."""
        if self.warmup_steps + self.num_decay_steps(max_steps) <= max_steps:
            return self
        decay = self.decay_steps if self.type == "linear" and self.decay_steps else None
        given = self.warmup_steps * 2 if decay is None else self.warmup_steps + decay
        warmup = max_steps * self.warmup_steps // given
        return self.model_copy(update={"warmup_steps": warmup, "decay_steps": None})

    def check(self, peak: float, max_steps: int) -> None:
        """Raises ``ConfigError`` if it does not fit a run of ``max_steps`` at rate ``peak``."""
        warmup = self.warmup_steps
        decay = self.num_decay_steps(max_steps)
        if warmup + decay > max_steps:
            raise ConfigError(
                f"trainer.scheduler: warmup_steps {warmup} and decay_steps {decay} "
                f"take {warmup + decay} steps, max_steps is {max_steps}. Shorten one of them."
            )

        for name, value, types in (
            ("decay_steps", self.decay_steps, ("linear",)),
            ("min_lr", self.min_lr, ("linear", "cosine")),
        ):
            if value and self.type not in types:
                raise ConfigError(
                    f"trainer.scheduler.{name} is {value:g}, and no schedule {self.type!r} reads "
                    f"it, only {' and '.join(types)}. Leave it out, or set trainer.scheduler.type."
                )

        if self.min_lr > peak:
            raise ConfigError(
                f"trainer.scheduler.min_lr is {self.min_lr}, expected at most optim.lr {peak}"
            )


NormalizeBy: TypeAlias = Literal["tokens", "sequences", "rollouts", "groups", "constant", "env"]


class LossTable(PluginTable):
    """``[trainer.losses.<name>]``: a loss that an algorithm names as its ``action_loss``. Its other
    keys belong to the loss plugin."""

    normalize_by: NormalizeBy | None = None
    """What the sum is divided by. ``tokens``: the trained tokens of the batch. ``sequences``,
    ``rollouts``, ``groups``: each unit's tokens are averaged, then the units. ``constant``: the key
    ``constant``. ``env``: ``tokens`` with ``per_env``. None: what the loss declares."""
    per_env: bool | None = None
    """Divide each env's part by that env's own number, so that no env dilutes another. None: as
    ``trainer.loss``."""
    constant: PositiveFloat | None = None
    """The divisor of ``normalize_by = "constant"``. With ``batch_size`` times the longest
    completion, each token counts alike, whatever the length of its rollout."""

    @model_validator(mode="after")
    def _keys_agree(self) -> LossTable:
        if self.normalize_by == "constant" and self.constant is None:
            raise ConfigError(
                'normalize_by is "constant", and the key constant is missing. Set it.'
            )
        if self.normalize_by == "env" and self.per_env is False:
            raise ConfigError('normalize_by is "env", and per_env is false. Leave one of them out.')
        return self


class LossConfig(LossTable):
    """``[trainer.loss]``: the loss of the rl component. Its other keys belong to the loss
    plugin."""

    type: str = ""
    """Name of an installed loss. Required."""


class HeadTable(PluginTable):
    """``[trainer.heads.<name>]``: a head of the run. Its other keys belong to the head plugin."""

    lr: PositiveFloat | None = None
    """Peak learning rate; it follows ``trainer.scheduler``. None: ``trainer.optim.lr``. Heads train
    with AdamW, and each is clipped to ``trainer.optim.max_norm`` by itself."""
    detach: bool = False
    """Its losses train the head alone: no gradient into the hidden states."""
    own_model: bool = False
    """Put the head on a copy of the policy, which only the head's losses train."""


class TrainerConfig(PluginTable):
    """``[trainer]``. A table ``[trainer.<name>]`` that is no key below belongs to the tuning or
    trainer observer of that name."""

    __pydantic_extra__: dict[str, dict[str, Any]]

    optim: OptimConfig = OptimConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    loss: LossConfig = LossConfig()
    losses: dict[str, LossTable] = {}
    """Settings of further losses by name."""
    heads: dict[str, HeadTable] = {}
    """The heads of the run by name, with their settings. A table may be empty."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of compute. ``auto``: ``bfloat16`` on a GPU that has it, else ``float32``. Weights
    that train and optimizer state are float32: bfloat16 would round typical steps away."""
    minibatches: PositiveInt = 1
    """Optimizer steps per pass over a batch: parts of about equal work, of whole groups. The
    learning rate and the version are those of the batch; each part is clipped by itself."""
    epochs: PositiveInt = 1
    """Passes over a batch. The first takes the minibatches in order, later ones shuffle them."""
    ema_decay: Annotated[float, Field(ge=0, lt=1)] | None = None
    """For readers of ``ema_logprobs`` or ``host.ema``: after each batch, average = decay * average
    + (1 - decay) * weights. It starts at the first weights."""
    micro_batch_tokens: PositiveInt | None = None
    """Capacity of one packed row, in tokens. None: ``seq_len``."""
    attention: str = "auto"
    """The installed kernel that separates the documents of a packed row: ``varlen`` computes each
    alone, ``mask`` builds a dense block mask, ``auto`` takes the faster one for the device. If it
    is not exact for the model (checked at start-up), and for ``auto`` if none is installed,
    documents run one by one through transformers' attention."""
    fused_lm_head: Literal["auto"] | bool = "auto"
    """Compute logits in blocks, forward and again backward, and never store them: saves memory for
    a quarter more arithmetic in the head. ``auto``: for rows with many logits. Always on with
    ``bfloat16``, where a separate head would round its logits."""
    lm_head_block: PositiveInt | None = None
    """Logits per block. None: 2^20 on CPU (4 MiB), 2^26 on a GPU (256 MiB)."""
    activation_checkpointing: NonNegativeInt = 0
    """Recompute every n-th decoder block in the backward pass instead of storing its activations.
    1: all, for a third more arithmetic and the least memory. 0: none."""
    compile: bool = False
    """Compile the decoder blocks with ``torch.compile``. The first steps take minutes. Needs a C++
    compiler, and triton on a GPU."""
    share_prompts: bool = True
    """Compute a prompt shared by rollouts of a row once. On CPU, with ``varlen`` attention, for
    models whose log π stays the same (checked at start-up)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """``auto``: CUDA if present."""
    num_ranks: PositiveInt | None = None
    """Training processes, one per GPU; each holds a shard of weights and optimizer state. None: one
    per entry of ``deployment.trainer_gpus``, else one."""
    dp_replicate: PositiveInt = 1
    """Copies of the model: the ranks form this many groups, each of which shards one copy. 1: all
    ranks share one copy; ``num_ranks``: each rank has a whole one."""
    keep_broadcasts: Annotated[int, Field(ge=2)] = 2
    """Published weight versions to keep on disk; an engine may still be loading the previous one.
    """
    publish_dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of published weights. ``bfloat16`` halves the bytes, and is the default where the
    run's engine is known to serve in it: it would round float32 to the same numbers. Adapters,
    checkpoints and the final export keep full precision."""
    max_bad_steps: PositiveInt = 3
    """Consecutive steps that may be skipped for a loss or gradient that is not finite; then the run
    ends. A batch of several optimizer steps counts if none of them was finite."""

    @model_validator(mode="before")
    @classmethod
    def _null_is_no_table(cls, table: Any) -> Any:
        """A run.json of version 0.1 has ``"lora": null``."""
        if not isinstance(table, dict):
            return table
        known = cls.model_fields
        return {key: v for key, v in table.items() if key in known or v is not None}

    @model_validator(mode="after")
    def _replicas_divide_ranks(self) -> TrainerConfig:
        if self.num_ranks is not None:
            self.check_ranks(self.num_ranks)
        return self

    @model_validator(mode="after")
    def _bfloat16_needs_the_fused_head(self) -> TrainerConfig:
        if self.fused_lm_head is False and self.dtype == "bfloat16":
            raise ConfigError(
                "trainer.fused_lm_head is false, and it is always on with trainer.dtype = "
                "'bfloat16', where a separate head would round its logits. Leave one of them out."
            )
        return self

    def check_ranks(self, num_ranks: int) -> None:
        """Raises ``ConfigError`` unless ``dp_replicate`` divides the ranks."""
        if num_ranks % self.dp_replicate:
            raise ConfigError(
                f"trainer.dp_replicate is {self.dp_replicate}, which does not divide the trainer's "
                f"{num_ranks} ranks. Set it to a divisor of trainer.num_ranks."
            )
