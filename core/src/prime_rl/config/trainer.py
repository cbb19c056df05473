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
from prime_rl.errors import ConfigError


class OptimConfig(Settings):
    """``[trainer.optim]``: the optimizer and gradient clipping. A key of another optimizer is
    refused."""

    type: Literal["adamw", "sgd", "muon", "sign_sgd"] = "adamw"
    """``muon`` makes the updates of the blocks' matrices orthogonal, scaled to AdamW's usual size,
    so that one learning rate serves both; embeddings, head, norms and biases take AdamW's.
    ``sgd`` without momentum and ``sign_sgd`` keep no state."""
    lr: PositiveFloat = 1e-6
    """Peak learning rate."""
    weight_decay: NonNegativeFloat = 0.01
    """Decoupled: times the learning rate, off the weights each step."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """adamw, muon: decay of the gradient's running mean."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """adamw, muon: decay of the squared gradient's running mean."""
    eps: PositiveFloat = 1e-8
    """adamw, muon: added to the root of the squared gradient's mean."""
    momentum: Annotated[float, Field(ge=0, lt=1)] | None = None
    """sgd, muon: decay of the sum of gradients. None: 0 for sgd, 0.95 for muon."""
    nesterov: bool | None = None
    """sgd, muon: look one step of momentum ahead. None: not with sgd, but with muon."""
    ns_steps: Annotated[int, Field(ge=1, lt=100)] = 5
    """muon: Newton-Schulz iterations that make an update orthogonal."""
    max_norm: PositiveFloat | None = 1.0
    """Clip the global gradient norm to this. None: no clipping."""

    @model_validator(mode="after")
    def _keys_of_this_optimizer(self) -> OptimConfig:
        for key, owners in OWNERS.items():
            value = getattr(self, key)
            if self.type not in owners and value != type(self).model_fields[key].default:
                raise ConfigError(
                    f"{key} is a key of {' and '.join(owners)}, and type is {self.type!r}. "
                    f"Remove {key}, or choose another type."
                )
        if self.type == "sgd" and self.nesterov and not self.momentum:
            raise ConfigError("nesterov needs a momentum above 0. Set momentum, 0.9 for example.")
        return self


OWNERS = {
    **dict.fromkeys(("beta1", "beta2", "eps"), ("adamw", "muon")),
    **dict.fromkeys(("momentum", "nesterov"), ("sgd", "muon")),
    "ns_steps": ("muon",),
}
"""Which optimizers a key of ``[trainer.optim]`` belongs to; one that is not named here, to all."""


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

    type: str = ""
    """Name of an installed loss. Needed."""
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


class LoraConfig(Settings):
    """``[trainer.lora]``: train small matrices beside the frozen weights (LoRA). Adapters are
    published; the run's end leaves a merged model. Needs ``pip install "prime-rl-core[lora]"``."""

    rank: PositiveInt = 16
    """r, inner size of the two matrices: A [r, inputs], B [outputs, r]."""
    alpha: PositiveInt = 32
    """A module's output is W x + alpha / rank * B A x."""
    use_rslora: bool = False
    """alpha / sqrt(rank) instead, with which large ranks learn as fast as small ones."""
    dropout: NonNegativeFloat = 0.0
    """Only 0: the engines sample without dropout, and what trains must be what was sampled from."""
    target_modules: Annotated[list[str], Field(min_length=1)] | None = None
    """Ends of the names of linear modules that get an adapter. None: all but the head."""
    modules_to_save: list[str] = []
    """Ends of the names of modules that train whole and are published with the adapter."""

    @model_validator(mode="after")
    def _can_run(self) -> LoraConfig:
        if self.dropout:
            raise ConfigError(
                f"dropout is {self.dropout}, expected 0: tokens are sampled without dropout, so "
                "logprobs with it would not be those of the policy that sampled. Leave it out."
            )
        if find_spec("peft") is None:
            raise ConfigError(
                "[trainer.lora] needs peft, which is not installed. Install it "
                '(pip install "prime-rl-core[lora]") or leave the table out.'
            )
        return self


class TrainerConfig(Settings):
    """``[trainer]``"""

    optim: OptimConfig = OptimConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    loss: LossConfig = LossConfig()
    token_export: TokenExportConfig = TokenExportConfig()
    lora: LoraConfig | None = None
    """None: all weights train."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of compute. Weights and optimizer state stay in float32: steps of a usual size
    would
    vanish in bfloat16's rounding."""
    micro_batch_tokens: PositiveInt | None = None
    """Capacity of one packed row, in tokens. None: ``seq_len``."""
    attention: Literal["auto", "varlen", "mask"] = "auto"
    """How documents of a packed row are kept apart: ``varlen`` computes each document by itself,
    ``mask`` builds a dense block mask. ``auto`` takes the faster one for the device. A model for
    which neither is exact (checked at start-up) gets its documents apart, with transformers'
    attention."""
    fused_lm_head: Literal["auto"] | bool = "auto"
    """Compute logits block by block, going forward and again going backward, and never keep them:
    memory for a quarter of the head's arithmetic. ``auto``: where a row's logits are many. With
    ``bfloat16`` always: called by itself the head would round its logits."""
    lm_head_block: PositiveInt | None = None
    """Logits of such a block. None: 2^20 on CPU (4 MiB), 2^26 on a GPU (256 MiB)."""
    activation_checkpointing: NonNegativeInt = 0
    """Recompute every n-th decoder block going backward instead of keeping its activations. 1: all
    of them, which takes a third more arithmetic and the least memory. 0: none."""
    compile: bool = False
    """Compile the decoder blocks with ``torch.compile``. The first steps take minutes. Needs a C++
    compiler, and triton on a GPU."""
    share_prompts: bool = True
    """Compute a prompt that several rollouts of a row start from once: the same numbers for less
    work. On CPU, with ``varlen`` attention, for models whose log π stays the same (checked at
    start-up)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """``auto`` takes CUDA if there is one."""
    num_ranks: PositiveInt | None = None
    """Processes that train together, one a GPU; each holds a part of weights and optimizer state.
    None: one for each of ``deployment.trainer_gpus``, else one."""
    dp_replicate: PositiveInt = 1
    """Copies of the model: the ranks form so many groups, and each group shards one copy among its
    ranks. 1: all ranks share one copy; ``num_ranks``: each has a whole one."""
    attention_flops: NonNegativeFloat = 1e-4
    """What one more token of context costs each token, relative to its linear layers: layers *
    heads * head size / parameters. Rows are balanced over ranks by n * (1 + attention_flops * n)
    for each sample of n tokens."""
    keep_broadcasts: Annotated[int, Field(ge=2)] = 2
    """How many published weight versions stay on disk; an engine may still be loading the last but
    one."""
    publish_dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of published weights. ``bfloat16``: half the bytes, for engines that serve in it:
    they get the numbers that they would round float32 to. Other engines would get worse ones.
    Adapters, checkpoints and the final export stay as they train."""
    max_bad_steps: PositiveInt = 3
    """Steps in a row that may be skipped because their loss or gradient is not finite; then the run
    ends."""

    @model_validator(mode="after")
    def _replicas_divide_ranks(self) -> TrainerConfig:
        if self.num_ranks is not None:
            self.check_ranks(self.num_ranks)
        return self

    def check_ranks(self, num_ranks: int) -> None:
        """Raises ``ConfigError`` unless ``dp_replicate`` divides the ranks."""
        if num_ranks % self.dp_replicate:
            raise ConfigError(
                f"trainer.dp_replicate is {self.dp_replicate}, which does not divide the trainer's "
                f"{num_ranks} ranks. Set it to a divisor of trainer.num_ranks."
            )
