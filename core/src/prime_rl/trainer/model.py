"""The policy: a Hugging Face causal LM with the trainer's attention."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import register_fsdp_forward_method
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from prime_rl.config.trainer import TrainerConfig
from prime_rl.errors import ConfigError, WeightsError
from prime_rl.rundir.launch import READY, Launch
from prime_rl.rundir.status import Status
from prime_rl.trainer import parallel
from prime_rl.trainer.attention import register
from prime_rl.trainer.blocks import prepare_blocks
from prime_rl.trainer.logprobs import token_logprobs
from prime_rl.trainer.lora import add_lora
from prime_rl.trainer.packing import Packing, packings, use_attention
from prime_rl.trainer.place import Place
from prime_rl.trainer.row import Row

POLL_SECONDS = 0.02


class Policy(nn.Module):
    """The model as the trainer asks it: a row in, logprobs and entropies out.

    One forward for all of it, LM head included, because gathering sharded weights hangs on a
    module's forward (``parallel.py``).
    """

    def __init__(self, model: PreTrainedModel, config: TrainerConfig) -> None:
        super().__init__()
        self.model = model
        self.head = (config.fused_lm_head, config.lm_head_block)
        self.packing = packings(config, model.device)[0]

    def use(self, packing: Packing) -> None:
        """Rows go through the model like this from now on. Raises ``ValueError`` if the model's
        kind does not have the attention."""
        use_attention(self.model, packing.attention)
        self.packing = packing

    def forward(self, row: Row) -> tuple[Tensor, Tensor]:
        """See ``token_logprobs``."""
        return token_logprobs(self.model, row, *self.head, packing=self.packing.name)

    def plain_logprobs(self, token_ids: Tensor) -> Tensor:
        """[T] log π of one document as transformers computes it; of the first token 0."""
        logits = self.model(input_ids=token_ids[None], use_cache=False).logits[0, :-1]
        logprobs = logits.float().log_softmax(-1).gather(1, token_ids[1:, None])[:, 0]
        return nn.functional.pad(logprobs, (1, 0))


def make_policy(model: PreTrainedModel, device: torch.device, config: TrainerConfig) -> Policy:
    """The policy on its device; with several ranks, this rank's part of it."""
    policy = Policy(model, config)
    prepare_blocks(model, config, choose_device(config.device))
    if parallel.several_ranks():
        blocks = set(model._no_split_modules or ())
        parallel.shard(policy, blocks, device, config.dp_replicate)
        register_fsdp_forward_method(policy, "plain_logprobs")
    return policy.to(device)


def choose_device(name: Literal["auto", "cpu", "cuda"], place: Place | None = None) -> torch.device:
    """Raises ``ConfigError`` for a GPU that is not there. ``place``: of several ranks, each has its
    own."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "trainer.device is 'cuda', but torch sees no GPU. Set it to 'auto' or 'cpu'."
        )
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    if place is None or place.size == 1:
        return torch.device("cuda")
    if place.local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"rank {place.rank} of {place.size} is number {place.local_rank} on its machine, where "
            f"torch sees {torch.cuda.device_count()} GPUs: ranks cannot share one. Lower "
            "trainer.num_ranks, give deployment.trainer_gpus more, or set trainer.device = 'cpu'."
        )
    return torch.device("cuda", place.local_rank)


def model_folder(launch: Launch, status: Status) -> Path:
    """The policy's folder, waited for if it is still being made or fetched.

    Raises ``WeightsError`` if it is no folder.
    """
    path = Path(launch.model_path)
    if launch.wait_for_model and not (path / READY).exists():
        status.report("waiting", waiting_for=f"model folder {path.name}")
        while not (path / READY).exists():
            time.sleep(POLL_SECONDS)
    if not path.is_dir():
        raise WeightsError(f"the policy's folder {path} is not there; expected a model folder")
    return path


def load_model(
    model_path: Path, config: TrainerConfig, adapter: Path | None = None, on_host: bool = False
) -> PreTrainedModel:
    """The policy without dropout: π has to be what the engines sample from. On its device; with
    several ranks, or ``on_host``, on the host, where each takes its part (``make_policy``). With
    ``[trainer.lora]`` it is frozen, with an adapter in it that goes on from the folder ``adapter``.

    Raises ``WeightsError`` if the folder lacks weights, ``ConfigError`` if the trainer cannot train
    its kind.
    """
    register()
    transformers_logging.disable_progress_bar()
    device = choose_device("cpu" if on_host or parallel.several_ranks() else config.device)
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            model_path,
            dtype=torch.float32,
            output_loading_info=True,
            local_files_only=True,
        )
    except (OSError, ValueError) as error:
        raise WeightsError(f"cannot load the policy from {model_path}: {error}") from error
    _check(model, report, model_path)
    use_attention(model, packings(config, device)[0].attention)
    if config.lora is not None:
        add_lora(model, config.lora, model_path, adapter)
    return model.eval().to(device)


def _check(model: Any, report: dict[str, Any], model_path: Path) -> None:
    if report["missing_keys"]:
        missing = sorted(report["missing_keys"])
        raise WeightsError(
            f"{model_path} lacks {len(missing)} of the policy's weights, first {missing[0]!r}: "
            "training would start from random numbers there. Make or fetch the folder again."
        )
