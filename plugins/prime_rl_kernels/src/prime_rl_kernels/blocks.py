"""Decoder blocks that are recomputed in the backward pass, or compiled."""

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

from prime_rl import ConfigError

COMPILERS = ("c++", "g++", "clang++")


def prepare_blocks(model: nn.Module, recomputed: int, compiled: bool, device: torch.device) -> None:
    """Recompute every n-th decoder block and compile all, in place. ``device``: where the model
    will train. Raises ``ConfigError`` without blocks or a compiler.

    A block's ``forward`` is replaced on the module itself: names of weights stay, and FSDP's hooks
    still surround it. The compiled forward is inside the recomputed one.
    """
    if not recomputed and not compiled:
        return
    names = set(getattr(model, "_no_split_modules", None) or ())
    blocks = [module for module in model.modules() if type(module).__name__ in names]
    if not blocks:
        raise ConfigError(
            f"trainer.activation_checkpointing and trainer.compile work block by block, and "
            f"{type(model).__name__} does not say which modules are its blocks. Set both off."
        )

    if compiled:
        check_compiler(device)
    for number, block in enumerate(blocks):
        vars(block).pop("forward", None)  # of an earlier call
        forward: Callable[..., Any] = block.forward
        if compiled:
            forward = torch.compile(forward, dynamic=True)
        if recomputed and number % recomputed == 0:
            # Nothing is drawn at random: the policy trains without dropout.
            forward = partial(checkpoint, forward, use_reentrant=False, preserve_rng_state=False)
        vars(block)["forward"] = forward


def check_compiler(device: torch.device) -> None:
    """Raises ``ConfigError`` that names what ``torch.compile`` lacks here."""
    missing = None
    if sys.platform == "win32":
        missing = "a platform other than Windows"
    elif not any(map(shutil.which, COMPILERS)):
        missing = f"a C++ compiler on the path ({', '.join(COMPILERS)})"
    elif device.type == "cuda" and find_spec("triton") is None:
        missing = "triton (pip install triton)"

    if missing:
        raise ConfigError(f"trainer.compile needs {missing}. Install it, or set it to false.")
