"""What is done to the decoder blocks before training: recomputing their activations, compiling.

A block's ``forward`` is replaced on the module itself, so that names of weights stay, and what
hangs on the module's call (FSDP's gathering) still surrounds it. Innermost is the compiled block,
then the recomputation. Attention stays outside of what is compiled: which documents a row holds
changes with every row, and a graph that knew them would be compiled again for each.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from prime_rl.config.trainer import TrainerConfig
from prime_rl.errors import ConfigError
from prime_rl.trainer import attention

COMPILERS = ("c++", "g++", "clang++")


def prepare_blocks(
    model: PreTrainedModel, config: TrainerConfig, device: torch.device | None = None
) -> None:
    """Recompute and compile what the config says, in place. ``device``: where it will train, if
    it is not there yet.

    Raises ``ConfigError`` if the model has no blocks, or there is no compiler.
    """
    every = config.activation_checkpointing
    if not every and not config.compile:
        return
    blocks = decoder_blocks(model)
    if config.compile:
        check_compiler(device or model.device)
        attention.register(torch.compiler.disable)
    for number, block in enumerate(blocks):
        vars(block).pop("forward", None)  # of an earlier call
        forward: Callable[..., Any] = block.forward
        if config.compile:
            forward = torch.compile(forward, dynamic=True)
        if every and number % every == 0:
            # Nothing is drawn at random: the policy trains without dropout.
            forward = partial(checkpoint, forward, use_reentrant=False, preserve_rng_state=False)
        vars(block)["forward"] = forward


def decoder_blocks(model: PreTrainedModel) -> list[nn.Module]:
    """The model's repeated blocks, in order. Raises ``ConfigError`` if it names none."""
    names = set(model._no_split_modules or ())
    blocks = [module for module in model.modules() if type(module).__name__ in names]
    if not blocks:
        raise ConfigError(
            f"trainer.activation_checkpointing and trainer.compile work block by block, and "
            f"{type(model).__name__} does not say which modules are its blocks. Set both off."
        )
    return blocks


def check_compiler(device: torch.device) -> None:
    """Raises ``ConfigError`` where ``torch.compile`` cannot work, with what is missing."""
    missing = None
    if sys.platform == "win32":
        missing = "a platform other than Windows"
    elif not any(map(shutil.which, COMPILERS)):
        missing = f"a C++ compiler on the path ({', '.join(COMPILERS)})"
    elif device.type == "cuda" and find_spec("triton") is None:
        missing = "triton (pip install triton)"
    if missing:
        raise ConfigError(f"trainer.compile needs {missing}. Install it, or set it to false.")
