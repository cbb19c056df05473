"""The policy: a Hugging Face causal LM."""

from __future__ import annotations

import time
from collections.abc import Container, Iterable
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.fsdp import register_fsdp_forward_method
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from prime_rl.config.trainer import TrainerConfig
from prime_rl.errors import ConfigError, WeightsError
from prime_rl.plugins.base import PluginConfig
from prime_rl.plugins.loss import Head
from prime_rl.plugins.trainer import Kernel, Tuning
from prime_rl.rundir.launch import READY, Launch
from prime_rl.rundir.status import Status, names_in
from prime_rl.trainer import parallel
from prime_rl.trainer.device import HOST, choose_device, compute_dtype
from prime_rl.trainer.heads import HeadModule
from prime_rl.trainer.logprobs import token_logprobs
from prime_rl.trainer.packed_row import APART, PackedRow
from prime_rl.trainer.packing import Packing, use_attention
from prime_rl.trainer.unread import unread_model

POLL_SECONDS = 0.02


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
        self.kernel.prepare(config.compile)
        self.model = model
        self.heads = nn.ModuleList(heads)
        self.read: Container[str] = ()
        """The computed columns and the heads that losses of the batch read."""
        self.packing = self.packings(model.device)[0]

    def packings(self, device: torch.device) -> list[Packing]:
        """The ways that the kernel has, and core's own, which is the slowest."""
        return [*self.kernel.packings(device), APART]

    def use(self, packing: Packing) -> None:
        """Compute rows like this from now on. Raises ``ValueError`` if the model's kind lacks the
        attention."""
        for model in (self.model, *(each.model for each in self.heads if each.model is not None)):
            use_attention(cast(PreTrainedModel, model), packing.attention)
        self.packing = packing

    def forward(self, row: PackedRow) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """See ``token_logprobs``; and the output [T] of each head that is read."""
        packing = self.packing
        read = [head for head in self.heads if head.name in self.read]
        hidden = packing.hidden_states(self.model, row.layout)
        heads: dict[str, Tensor] = {str(head.name): head(row, hidden, packing) for head in read}
        given = ("entropies" in self.read, hidden, "top_logprobs" in self.read)
        return *token_logprobs(self.model, row, packing, self.kernel, *given), heads

    def plain_logprobs(self, token_ids: Tensor) -> Tensor:
        """[T] log π of one document as transformers computes it; 0 for the first token."""
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
    modules = [HeadModule(head, config.heads[head.name], model) for head in heads]
    policy = Policy(model, config, modules, kernel)
    half = in_half(config, device)
    for each in filter(None, (model, *(head.model for head in modules))):
        policy.kernel.prepare_blocks(each, config.activation_checkpointing, config.compile, device)
    if parallel.several_ranks() or half:
        parallel.shard(
            policy,
            set(model._no_split_modules or ()),
            device,
            config.dp_replicate,
            home,
            half=half,
            exact=modules if half else (),
            tuned=hasattr(model, "prime_rl_tuning"),
        )
        register_fsdp_forward_method(policy, "plain_logprobs")

    return policy.to(home or device)


def in_half(config: TrainerConfig, device: torch.device) -> bool:
    """Whether the model computes in bfloat16."""
    return compute_dtype(config.dtype, device) == "bfloat16"


def model_folder(launch: Launch, status: Status) -> Path:
    """Wait for the policy's folder, and that of its first weights, if they are still being made or
    fetched. Raises ``WeightsError`` if it is no folder."""
    path = Path(launch.model_path)
    made = path / READY if launch.wait_for_model else launch.initial
    if (launch.wait_for_model or made != path) and not made.exists():
        status.report("waiting", waiting_for=f"model folder {launch.initial.name}")
        while made.name not in names_in(made.parent):
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
        model.prime_rl_tuning = tuning

    return model.eval().to(HOST if on_host or in_shards else device) if whole else model.eval()
