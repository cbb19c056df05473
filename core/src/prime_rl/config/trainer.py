"""``[trainer]``: optimizer, loss, precision and ranks."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    StrictBool,
    model_validator,
)

from prime_rl.config.base import PluginTable, Settings, Variables
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
        steps_given = self.warmup_steps * 2 if decay is None else self.warmup_steps + decay
        warmup = max_steps * self.warmup_steps // steps_given
        # None: the decay takes all that the warm-up leaves.
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


class ReferenceResetConfig(Settings):
    """``[trainer.reference_reset]``: now and then the reference becomes the policy (Liu et al.
    2025, ProRL, arXiv:2505.24864)."""

    interval: PositiveInt
    """After step n, a multiple of it, ``initial_logprobs`` and ``host.initial`` are those of
    version n."""
    optimizer: bool = True
    """The policy's optimizer begins anew too, as in the paper. Heads keep theirs, and the learning
    rate goes on (``trainer.scheduler``)."""


ROUTER_BIASES = ("e_score_correction_bias", "expert_bias")
"""Names of the bias with which a router ranks experts, and which has no gradient."""
EXPERT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts")
"""Keys of a model's ``config.json`` for the number of experts of a layer, by family."""


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
    reference_reset: ReferenceResetConfig | None = None
    """None: the reference keeps the policy's first weights."""
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
    activation_checkpointing: NonNegativeInt = 0
    """Recompute every n-th decoder block in the backward pass instead of storing its activations.
    1: all, for a third more arithmetic and the least memory. 0: none."""
    keep_attention: bool = False
    """Blocks that ``activation_checkpointing`` recomputes keep the output of their attention: it is
    not computed again. That takes tokens x heads x head size numbers for each block."""
    offload_activations: bool = False
    """The inputs of blocks that ``activation_checkpointing`` recomputes lie in host memory until
    their backward pass: tokens x hidden size numbers for each block. For rows of 32k tokens and
    more."""
    compile: Literal["auto"] | bool = "auto"
    """Compile the decoder blocks with ``torch.compile``. The first steps take minutes. Needs a C++
    compiler, and triton on a GPU. ``auto``: on a GPU, for models of 100M weights or more, if a row
    has the same log π and gradients with compiled blocks (checked at start-up)."""
    triton_kernels: bool = True
    """On a GPU: one Triton kernel for each RMS norm, rotary embedding and SwiGLU of blocks that are
    not compiled, and for the passes over the head's logits, if they give the numbers of plain torch
    there (checked at start-up)."""
    share_prompts: bool = True
    """Compute a prompt shared by rollouts of a row once. On CPU, with ``varlen`` attention, for
    models whose log π stays the same (checked at start-up)."""
    router_replay: bool = False
    """For a mixture of experts: the engines report the experts by which they computed each token,
    and the trainer computes the token by the same ones. Near ties are otherwise decided differently
    by the two, which is most of a mixture's ``mismatch_kl``. Decoder blocks are not compiled."""
    expert_load: bool = False
    """For a mixture of experts: metrics of how evenly tokens are spread over the experts
    (``router/load/...``), and how often each expert of each layer was chosen
    (``expert_load.jsonl``). Decoder blocks are not compiled."""
    balance_loss: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """For a mixture of experts: this times the mean of ``router/balance`` is added to the loss, so
    that routers choose experts equally often. 0: not. Includes ``expert_load``. Not of routers
    with a bias (``balance_bias``)."""
    balance_bias: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """For a mixture whose routers rank experts by score plus bias (DeepSeek V3, GLM-4.5): after
    each optimizer step the bias of an expert rises by this if it was chosen less often than the
    mean, and falls by it if more often. 0: biases stay. Includes ``expert_load``. Not with
    adapters, which have no biases."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """``auto``: CUDA if present."""
    num_ranks: PositiveInt | None = None
    """Training processes, one per GPU; each holds a shard of weights and optimizer state. None: one
    per entry of ``deployment.trainer_gpus``, else one."""
    dp_replicate: PositiveInt = 1
    """Copies of the model: the ranks form this many groups, each of which shards one copy. 1: all
    ranks share one copy; ``num_ranks``: each rank has a whole one."""
    context_parallel: PositiveInt = 1
    """Ranks that compute a row together, each an equal part of its tokens: rows, and so
    ``seq_len``, may be this many times longer for the same memory. It divides the ranks and the
    model's attention heads; ranks of a row should be on one machine, as they exchange tokens in
    every layer."""
    reshard_after_forward: Literal["auto"] | bool = "auto"
    """Free the gathered weights of a block after its forward pass, and gather them again before its
    backward pass, for each row. ``false``: they stay until the last row of the optimizer step; that
    takes the whole model in ``dtype`` on each rank, and saves kernels and bytes between ranks.
    ``auto``: ``false`` on a GPU where that is at most 1/16 of its memory. The results are the same.
    One rank has gathered weights in ``bfloat16`` only. With ``expert_parallel`` experts are not
    among these weights: groups gather theirs anew for each row."""
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision in which ranks sum gradients. ``bfloat16`` halves those bytes, and rounds each
    rank's share and each sum; weights and optimizer state stay in float32. One rank sums nothing,
    and keeps ``float32``."""
    expert_parallel: StrictBool | NonNegativeInt = False
    """For a mixture of experts: so many neighboring ranks are a group that has all experts of a
    layer, and tokens travel to them within the group; the groups of a copy share the weights, which
    each gathers. It divides the ranks that share a copy; those of a machine are best. ``true``: all
    ranks of a copy are one group, and gather no experts. ``false``, 0 or 1: each rank gathers all
    experts. Few tokens per rank and many experts make travelling cheaper."""
    keep_broadcasts: Annotated[int, Field(ge=2)] = 2
    """Published weight versions to keep on disk, in ``broadcasts/``. A run needs two: an engine may
    still be loading the previous one. Keep more to compare versions afterwards, as the engines got
    them: a checkpoint's are not rounded to ``publish_dtype``."""
    publish_dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of published weights. ``bfloat16`` halves the bytes, and is the default where the
    run's engine is known to serve in it: it would round float32 to the same numbers. Adapters,
    checkpoints and the final export keep full precision."""
    max_bad_steps: PositiveInt = 3
    """Consecutive steps that may be skipped for a loss or gradient that is not finite; then the run
    ends. A batch of several optimizer steps counts if none of them was finite."""

    env_vars: Variables = {}
    """Environment variables of the trainer, beside those of the top-level ``env_vars``."""

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
    def _recomputed_blocks_are_there(self) -> TrainerConfig:
        for key in ("keep_attention", "offload_activations"):
            if getattr(self, key) and not self.activation_checkpointing:
                raise ConfigError(
                    f"trainer.{key} is true, and it is about recomputed blocks, of which there are "
                    "none. Set trainer.activation_checkpointing = 1, or leave it out."
                )
        return self

    @model_validator(mode="after")
    def _choices_of_routers_are_not_compiled(self) -> TrainerConfig:
        if self.router_replay and self.compile is True:
            raise ConfigError(
                "trainer.compile is true, and trainer.router_replay replaces the choices of the "
                "routers inside the decoder blocks, which a compiled graph would not see. Leave "
                "one of them out."
            )
        if self.watches_experts and self.compile is True:
            raise ConfigError(
                "trainer.compile is true, and trainer.expert_load, balance_loss and balance_bias "
                "look at the choices of the routers inside the decoder blocks, which a compiled "
                "graph would not show. Leave one of them out."
            )
        if self.sends_tokens and self.compile is True:
            raise ConfigError(
                "trainer.compile is true, and with trainer.expert_parallel ranks exchange tokens "
                "inside the decoder blocks, as many as routers choose, which no compiled graph can "
                "know. Leave one of them out."
            )
        return self

    @model_validator(mode="after")
    def _bfloat16_needs_the_fused_head(self) -> TrainerConfig:
        if self.fused_lm_head is False and self.dtype == "bfloat16":
            raise ConfigError(
                "trainer.fused_lm_head is false, and it is always on with trainer.dtype = "
                "'bfloat16', where a separate head would round its logits. Leave one of them out."
            )
        return self

    @property
    def watches_experts(self) -> bool:
        """The choices of routers are counted."""
        return self.expert_load or self.balance_loss > 0 or self.balance_bias > 0

    @property
    def sends_tokens(self) -> bool:
        """Tokens travel to experts, if there are several ranks."""
        return self.expert_parallel is True or self.expert_parallel > 1

    def expert_ranks(self, num_ranks: int) -> int:
        """The ranks of a group within which tokens travel to experts; 1: all are gathered."""
        if self.expert_parallel is True:
            return num_ranks // self.dp_replicate
        return max(self.expert_parallel, 1)

    def check_layout(
        self, model: str, *, num_ranks: int, num_heads: int | None, num_experts: int | None
    ) -> None:
        """Raises ``ConfigError`` unless the model's attention heads and experts divide equally
        among the ranks. ``model``: its name. None: its folder does not say the number."""
        self.check_ranks(num_ranks)
        if num_heads is not None and num_heads % self.context_parallel:
            raise ConfigError(
                f"trainer.context_parallel is {self.context_parallel}, which does not divide the "
                f"{num_heads} attention heads of {model!r}. Set it to one of "
                f"{divisors(num_heads)}."
            )

        if not self.sends_tokens or num_experts is None:
            return
        if num_experts == 0:
            raise ConfigError(
                f"trainer.expert_parallel is set, and {model!r} has no experts. Leave it out, or "
                "set model.name to a mixture."
            )
        self.check_experts(num_experts, num_ranks)

    def check_experts(self, num_experts: int, num_ranks: int) -> None:
        """Raises ``ConfigError`` unless the ranks that share a copy of the model can have equally
        many experts each."""
        num_holders = num_ranks // self.dp_replicate
        if num_experts % num_holders == 0:
            return

        group = 1 if self.expert_parallel is True else self.expert_ranks(num_ranks)
        fitting = divisors(num_experts)
        if group not in fitting:
            copies = [n for n in divisors(num_ranks) if num_ranks // n in fitting[1:]]
            others = f", or to true with dp_replicate as one of {copies}" if copies else ""
            raise ConfigError(
                f"trainer.expert_parallel is {group}, which does not divide the {num_experts} "
                f"experts per layer. Set it to 1, so that each rank gathers all{others}."
            )

        shared = [size for size in fitting if size % group == 0]
        copies = [n for n in divisors(num_ranks) if num_ranks // n in shared]
        raise ConfigError(
            f"trainer.expert_parallel: the model has {num_experts} experts per layer, and "
            f"{num_holders} ranks share a copy ({num_ranks} ranks, trainer.dp_replicate = "
            f"{self.dp_replicate}), so the ranks would have different numbers of experts. Set "
            f"dp_replicate to one of {copies} with these ranks, or trainer.num_ranks to "
            f"dp_replicate times one of {shared}."
        )

    def check_ranks(self, num_ranks: int) -> None:
        """Raises ``ConfigError`` unless ``dp_replicate`` and ``context_parallel`` divide the ranks,
        and ``expert_parallel`` those of a copy."""
        if num_ranks % self.dp_replicate:
            raise ConfigError(
                f"trainer.dp_replicate is {self.dp_replicate}, which does not divide the trainer's "
                f"{num_ranks} ranks. Set it to one of {divisors(num_ranks)}, or "
                f"trainer.num_ranks to a multiple of {self.dp_replicate}."
            )

        if num_ranks % self.context_parallel:
            raise ConfigError(
                f"trainer.context_parallel is {self.context_parallel}, which does not divide the "
                f"trainer's {num_ranks} ranks. Set it to one of {divisors(num_ranks)}, or "
                f"trainer.num_ranks to a multiple of {self.context_parallel}."
            )

        num_holders = num_ranks // self.dp_replicate
        if num_holders % self.expert_ranks(num_ranks):
            raise ConfigError(
                f"trainer.expert_parallel is {self.expert_parallel}, which does not divide the "
                f"{num_holders} ranks that share a copy ({num_ranks} ranks, trainer.dp_replicate = "
                f"{self.dp_replicate}). Set it to one of {divisors(num_holders)}, or to true for "
                "all of them."
            )


def divisors(number: int) -> list[int]:
    """From 1 up to the number itself."""
    return [each for each in range(1, number + 1) if number % each == 0]
