"""The policy: a Hugging Face causal LM with the trainer's attention."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from prime_rl.config.trainer import TrainerConfig
from prime_rl.plugins.errors import ConfigError, WeightsError
from prime_rl.run.launch import READY, Launch
from prime_rl.run.status import Status
from prime_rl.trainer.attention import NAMES, Attention, register

POLL_SECONDS = 0.02

_HEADS_WITH_MORE = ("final_logit_softcapping", "logit_scale", "logits_scaling")
"""Config keys of models whose logits are more than a linear map of the hidden state."""


def choose_device(name: Literal["auto", "cpu", "cuda"]) -> torch.device:
    """Raises ``ConfigError`` for a GPU that is not there."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "trainer.device is 'cuda', but torch sees no GPU. Set it to 'auto' or 'cpu'."
        )
    chosen = "cuda" if name != "cpu" and torch.cuda.is_available() else "cpu"
    return torch.device(chosen)


def choose_attention(name: Literal["auto", "varlen", "mask"]) -> Attention:
    """``auto`` is ``varlen``: the faster one wherever it was measured."""
    return "mask" if name == "mask" else "varlen"


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


def load_model(model_path: Path, config: TrainerConfig) -> PreTrainedModel:
    """The policy on its device, without dropout: π has to be what the engines sample from.

    Raises ``WeightsError`` if the folder lacks weights, ``ConfigError`` if the trainer cannot train
    its kind.
    """
    register()
    transformers_logging.disable_progress_bar()
    device = choose_device(config.device)
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            model_path,
            dtype=torch.float32,
            attn_implementation=NAMES[choose_attention(config.attention)],
            output_loading_info=True,
            local_files_only=True,
        )
    except (OSError, ValueError) as error:
        raise WeightsError(f"cannot load the policy from {model_path}: {error}") from error
    _check(model, report, model_path)
    return model.eval().to(device)


def _check(model: Any, report: dict[str, Any], model_path: Path) -> None:
    if report["missing_keys"]:
        missing = sorted(report["missing_keys"])
        raise WeightsError(
            f"{model_path} lacks {len(missing)} of the policy's weights, first {missing[0]!r}: "
            "training would start from random numbers there. Make or fetch the folder again."
        )
    for key in _HEADS_WITH_MORE:
        if getattr(model.config, key, None) not in (None, 1, 1.0):
            raise ConfigError(
                f"model: {type(model).__name__} sets {key!r}, which the trainer's logprobs do not "
                "apply. Train a model without it."
            )
