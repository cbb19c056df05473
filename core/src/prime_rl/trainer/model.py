"""The policy: a Hugging Face causal LM."""

from __future__ import annotations

import logging
import time
from collections.abc import Container, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from prime_rl.config.trainer import TrainerConfig
from prime_rl.errors import ConfigError, WeightsError
from prime_rl.plugins.base import PluginConfig
from prime_rl.plugins.loss import Head
from prime_rl.plugins.trainer import Kernel, Tuning
from prime_rl.rundir.launch import READY, Launch
from prime_rl.rundir.status import Status, names_seen
from prime_rl.trainer import context, expert_ranks, parallel
from prime_rl.trainer.device import HOST, choose_device, compute_dtype
from prime_rl.trainer.expert_balance import (
    ExpertBalance,
    bias_places,
    check_routers,
    have_biases,
)
from prime_rl.trainer.heads import HeadModule
from prime_rl.trainer.logprobs import token_logprobs
from prime_rl.trainer.packed_row import APART, PackedRow
from prime_rl.trainer.packing import Packing, use_attention
from prime_rl.trainer.routes import (
    Replay,
    Watched,
    choosing,
    experts_of,
    observe_routers,
    watching,
)
from prime_rl.trainer.unread import unread_model

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.02
WORTH_COMPILING = 100_000_000
"""Weights. A smaller model's steps are too short to make up for the minutes of its compiler."""
GATHERED_SHARE = 1 / 16
"""Of a GPU's memory, for weights that stay gathered. Weights in float32, gradients and moments of
such a model take half of the memory at most."""


class Policy(nn.Module):
    """The model as the trainer calls it: a row in, logprobs, entropies and outputs of heads out.

    One forward for all of it, LM head included: FSDP gathers sharded weights in hooks of a module's
    forward (``parallel.py``).
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: TrainerConfig,
        heads: Iterable[HeadModule] = (),
        kernel: Kernel | None = None,
    ) -> None:
        super().__init__()
        self.kernel = kernel or Kernel(PluginConfig())
        self.kernel.prepare(config.compile is not False)  # "auto" may still compile
        self.compiled = False
        """The decoder blocks are."""

        self.model = model
        self.heads = nn.ModuleList(heads)
        self.read: Container[str] = ()
        """The computed columns and the heads that losses of the batch read."""

        self.packing = self.packings(model.device)[0]
        self.resident_experts: list[nn.Module] = []
        """Modules of experts to which tokens travel (``trainer.expert_parallel``)."""
        self.keeps_gathered = False
        """Weights stay gathered during a step (``trainer.reshard_after_forward``)."""

        is_observed = config.router_replay or config.watches_experts
        self.mixtures = observe_routers(model) if is_observed else []
        """Empty: routers are not observed."""
        self.balance: ExpertBalance | None = None
        """Of the batch that trains. None: nothing is counted."""
        self.routers_have_biases = have_biases(model)

        if config.balance_loss:
            check_routers(model)
        if config.watches_experts and not self.mixtures:
            raise ConfigError(
                "trainer.expert_load, balance_loss and balance_bias are about a mixture of "
                f"experts, and {type(model).__name__} has none. Leave them out."
            )
        if config.router_replay and not self.mixtures:
            raise ConfigError(
                f"trainer.router_replay is true, and {type(model).__name__} has no mixture of "
                "experts whose routers could be replayed. Set it to false."
            )
        self._bias_places = bias_places(model, self.mixtures) if config.balance_bias else []

    @property
    def moving_biases(self) -> list[Tensor]:
        """[E] of each mixture's router; none without ``trainer.balance_bias``."""
        return [getattr(module, name) for module, name in self._bias_places]

    @property
    def resident(self) -> list[nn.Parameter]:
        """The weights of experts to which tokens travel, and of their adapters."""
        return [weight for module in self.resident_experts for weight in module.parameters()]

    def prepare_blocks(self, config: TrainerConfig, device: torch.device, compiled: bool) -> None:
        """Recompute and compile decoder blocks as ``config`` says, or not compile them."""
        for model in (self.model, *(head.model for head in self.heads if head.model is not None)):
            self.kernel.prepare_blocks(
                model, config.activation_checkpointing, compiled=compiled, device=device
            )
        self.compiled = compiled

    def packings(self, device: torch.device) -> list[Packing]:
        """The ways that the kernel has, and core's own, which is the slowest. Of a row that several
        ranks compute: those that can split it."""
        packings = [*self.kernel.packings(device), APART]
        if context.num_parts() == 1:
            return packings

        splitting = [each for each in packings if each.splits_rows]
        if not splitting:
            raise ConfigError(
                f"trainer.context_parallel is {context.num_parts()}, and the kernel "
                f"{self.kernel.name!r} has no way to split a row over ranks. Install "
                "prime-rl-kernels and leave trainer.attention out, or leave context_parallel out."
            )
        return splitting

    def use(self, packing: Packing) -> None:
        """Compute rows like this from now on. Raises ``ValueError`` if the model's kind lacks the
        attention."""
        for model in (self.model, *(each.model for each in self.heads if each.model is not None)):
            use_attention(cast(PreTrainedModel, model), packing.attention)

        self.packing = packing

    def forward(
        self, row: PackedRow, replay: Replay | None = None
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """See ``token_logprobs``; and what each head that is read gives (``HeadModule``).
        ``replay``: takes the experts of the sampler."""
        packing = self.packing
        read = [head for head in self.heads if head.name in self.read]
        # The layout keeps the sampler's routes; a pass without replay must not follow them.
        layout = row.layout if replay is not None else replace(row.layout, routes=None)

        watched = None
        # Rows that train: not that of an idle rank, nor passes without a gradient.
        if self.balance is not None and torch.is_grad_enabled() and len(row.targets):
            watched = Watched(watcher=self.balance)

        with choosing(replay), watching(watched):
            hidden = packing.hidden_states(self.model, layout)

        heads: dict[str, Tensor] = {}
        for head in read:
            heads |= head(row, hidden, packing=packing, kernel=self.kernel)

        logprobs, entropies = token_logprobs(
            self.model,
            row,
            packing=packing,
            kernel=self.kernel,
            entropy_gradient="entropies" in self.read,
            hidden=hidden,
            top="top_logprobs" in self.read,
        )
        return logprobs, entropies, heads

    def replay(self, row: PackedRow) -> Replay | None:
        """The replay of the experts that this rank's tokens were sampled by. None: the row has
        none. Raises ``StreamError`` if they do not fit the model."""
        if row.layout.routes is None:
            return None

        routes = context.part_of_tokens(row.layout.routes)
        num_layers = self.model.config.get_text_config().num_hidden_layers
        return Replay(routes, self.mixtures, num_layers)

    def plain_logprobs(self, token_ids: Tensor) -> Tensor:
        """[T] log π of one document as transformers computes it; 0 for the first token."""
        # The last logits predict nothing.
        logits = self.model(input_ids=token_ids[None], use_cache=False).logits[0, :-1]
        logprobs = logits.float().log_softmax(-1).gather(1, token_ids[1:, None])[:, 0]
        return nn.functional.pad(logprobs, (1, 0))


def make_policy(
    model: PreTrainedModel,
    device: torch.device,
    config: TrainerConfig,
    heads: Iterable[Head] = (),
    kernel: Kernel | None = None,
    home: torch.device | None = None,
) -> Policy:
    """The policy for ``device``: whole in float32 on one rank; else this rank's shards, which a
    block gathers in ``trainer.dtype``. ``home``: where it lies until it is moved."""
    # Ranks join before `Policy` is made: it asks how many of them compute a row.
    context.join_ranks(config.context_parallel)

    # Heads come before compiling and sharding: one with a model of its own copies the policy.
    modules = [HeadModule(head, config.heads[head.name], model) for head in heads]
    policy = Policy(model, config, heads=modules, kernel=kernel)
    half = in_half(config, device)
    summed_in = reduce_dtype(config)

    if config.compile == "auto":
        _compile_if_worth_it(policy, config, device)
    else:
        policy.prepare_blocks(config, device, compiled=config.compile)

    experts = resident_experts(model, config, policy.kernel)
    policy.resident_experts = experts
    # Also on one rank in bfloat16: FSDP rounds a block's weights while the block runs.
    if parallel.several_ranks() or half:
        # Ranks that decided differently would have different collectives.
        memory = min(parallel.gather(_memory(device)))
        policy.keeps_gathered = keeps_gathered(config, gathered_bytes(policy, half), memory)
        parallel.shard(
            policy,
            set(model._no_split_modules or ()),
            device=device,
            replicas=config.dp_replicate,
            home=home,
            half=half,
            exact=modules if half or summed_in != torch.float32 else (),
            tuned=hasattr(model, "prime_rl_tuning"),
            experts=experts,
            reduces_in=summed_in,
            keeps_gathered=policy.keeps_gathered,
        )
        if experts:
            mesh = cast(DTensor, policy.resident[0]).device_mesh
            expert_ranks.join(mesh, config.expert_ranks(parallel.num_ranks()), reduces_in=summed_in)
        # FSDP gathers shards in hooks of `forward`, and this method is called without it.
        register_fsdp_forward_method(policy, "plain_logprobs")

    return policy.to(home or device)


def gathered_bytes(policy: Policy, half: bool) -> int:
    """Bytes of all weights that FSDP gathers, as a block computes with them: not of experts to
    which tokens travel."""
    num_weights = sum(weight.numel() for weight in policy.parameters())
    return (num_weights - sum(weight.numel() for weight in policy.resident)) * (2 if half else 4)


def keeps_gathered(config: TrainerConfig, num_bytes: int, memory: float) -> bool:
    """Whether so many bytes of weights stay gathered between the passes of a step. ``memory``:
    bytes of the GPU; 0: there is none."""
    if config.reshard_after_forward != "auto":
        return not config.reshard_after_forward
    return num_bytes <= GATHERED_SHARE * memory


def _memory(device: torch.device) -> float:
    if device.type != "cuda":
        return 0.0
    return float(torch.cuda.get_device_properties(device).total_memory)


def resident_experts(
    model: PreTrainedModel, config: TrainerConfig, kernel: Kernel
) -> list[nn.Module]:
    """The modules of experts to which tokens travel; none on one rank. Raises ``ConfigError`` if
    the model, the kernel or the number of ranks does not allow it."""
    if not config.sends_tokens:
        return []

    experts = experts_of(model)
    problem = ""
    if not experts:
        problem = f"{type(model).__name__} has no mixture whose experts lie in one weight"
    elif not kernel.computes_tokens_of_others:
        problem = f"the kernel {kernel.name!r} does not send tokens (pip install prime-rl-kernels)"
    if problem:
        raise ConfigError(f"trainer.expert_parallel is set: {problem}. Leave it out.")

    for num_experts in experts.values():
        config.check_experts(num_experts, parallel.num_ranks())
    return [*experts] if parallel.several_ranks() else []


def is_worth_compiling(policy: Policy, config: TrainerConfig, on_gpu: bool) -> bool:
    """The rule of ``trainer.compile = "auto"``."""
    num_weights = sum(each.numel() for each in policy.model.parameters())
    # A compiler would split a block at each exchange of tokens, and ranks may differ in where.
    in_blocks = config.router_replay or config.sends_tokens or config.watches_experts
    return on_gpu and num_weights >= WORTH_COMPILING and not in_blocks


def _compile_if_worth_it(policy: Policy, config: TrainerConfig, device: torch.device) -> None:
    """``trainer.compile = "auto"``, before the self-check has seen compiled blocks."""
    if is_worth_compiling(policy, config, on_gpu=device.type == "cuda"):
        try:
            policy.prepare_blocks(config, device, compiled=True)
            return
        except ConfigError as error:
            logger.warning("trainer.compile = 'auto': blocks are not compiled. %s", error)
    policy.prepare_blocks(config, device, compiled=False)


def reduce_dtype(config: TrainerConfig) -> torch.dtype:
    """In which ranks sum gradients. One rank has nothing to sum, and does not round."""
    if parallel.several_ranks() and config.reduce_dtype == "bfloat16":
        return torch.bfloat16
    return torch.float32


def in_half(config: TrainerConfig, device: torch.device) -> bool:
    """Whether the model computes in bfloat16."""
    return compute_dtype(config.dtype, device) == "bfloat16"


def model_folder(launch: Launch, status: Status) -> Path:
    """Wait for the policy's folder, and that of its first weights, if they are still being made or
    fetched. Raises ``WeightsError`` if it is no folder."""
    path = Path(launch.model_path)
    # A resumed run may need its first weights too, which are in another folder.
    made = path / READY if launch.wait_for_model else launch.initial
    # Not `exists`: a client of NFS answers a failed lookup from its cache (`names_in`).
    if (launch.wait_for_model or made != path) and made.name not in names_seen(made.parent):
        status.report("waiting", waiting_for=f"model folder {launch.initial.name}")
        while made.name not in names_seen(made.parent):
            time.sleep(POLL_SECONDS)

    if not path.is_dir():
        raise WeightsError(f"the policy's folder {path} is not there; expected a model folder")
    return path


def check_positions(config: PretrainedConfig, seq_len: int) -> None:
    """Raises ``ConfigError`` if a document of a row would change the rotary frequencies of the
    others: transformers picks those of "longrope" and "dynamic" by the largest position of a call.
    """
    config = config.get_text_config()
    ropes = getattr(config, "rope_parameters", None) or {}
    for rope in [ropes, *ropes.values()]:  # some models have one per type of layer
        kind = rope.get("rope_type") if isinstance(rope, dict) else None
        if kind not in ("longrope", "dynamic"):
            continue

        limit = rope.get("original_max_position_embeddings") or config.max_position_embeddings
        if seq_len > limit:
            raise ConfigError(
                f"seq_len: {seq_len} tokens, and the rotary positions of this model "
                f"({config.model_type}, rope_type {kind!r}) change beyond {limit}: a sample longer "
                "than that would change the log-probabilities of the others in its row. Set "
                f"seq_len to {limit} or less, or train a model with another rope_type."
            )


def load_model(
    model_path: Path,
    config: TrainerConfig,
    tuning: Tuning | None = None,
    adapter: Path | None = None,
    on_host: bool = False,
) -> PreTrainedModel:
    """The policy without dropout: π has to be what the engines sample from. In float32, on its
    device or ``on_host``; where it will be in shards, its weights are still in their files, if
    these allow it. A ``tuning`` freezes it and adds a new adapter, or that of the folder
    ``adapter``.

    Raises ``WeightsError`` if the folder lacks weights, ``ConfigError`` if the trainer cannot train
    its kind.
    """
    transformers_logging.disable_progress_bar()

    device = choose_device(config.device)
    in_shards = parallel.several_ranks() or in_half(config, device)
    model = cast(Any, None)
    missing = list[str]()
    try:
        # No rank loads the whole model: `parallel.fill` reads its shards from the files.
        if in_shards:
            model = unread_model(model_path)
        whole = model is None
        if whole:
            model, report = AutoModelForCausalLM.from_pretrained(
                model_path,
                dtype=torch.float32,
                output_loading_info=True,
                local_files_only=True,
            )
            missing = sorted(report["missing_keys"])
    except (OSError, ValueError, SafetensorError) as error:
        raise WeightsError(f"cannot load the policy from {model_path}: {error}") from error

    if missing:
        raise WeightsError(
            f"{model_path} lacks {len(missing)} of the policy's weights, first {missing[0]!r}: "
            "training would start from random numbers there. Make or fetch the folder again."
        )

    if tuning is not None:
        tuning.prepare(model, model_path, adapter)
        # Kept on the model, because every writer of weights has it (`published.tuning_of`).
        model.prime_rl_tuning = tuning

    # A model that is still in its files has no weights to move: `parallel.shard` places them.
    return model.eval().to(HOST if on_host or in_shards else device) if whole else model.eval()
