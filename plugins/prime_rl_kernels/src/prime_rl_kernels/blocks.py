"""Decoder blocks that are recomputed in the backward pass, or compiled."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from prime_rl import ConfigError
from prime_rl.trainer.routes import same_choices
from prime_rl_kernels.offload import Chain, Context, checkpoint_offloaded

COMPILERS = ("c++", "g++", "clang++")
ATTENTION = {
    "_varlen_attn",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
}
"""Operations of torch that compute attention in one kernel, whose output may be kept."""


def prepare_blocks(
    model: nn.Module,
    recomputed: int,
    compiled: bool,
    device: torch.device,
    keeps_attention: bool = False,
    offloads: bool = False,
) -> None:
    """Recompute every n-th decoder block and compile all, in place. ``device``: where the model
    will train. ``keeps_attention``: recompute all but attention. ``offloads``: keep the inputs of
    recomputed blocks in host memory. Raises ``ConfigError`` without blocks or a compiler.

    A block's ``forward`` is replaced on the module itself: names of weights stay, and FSDP's hooks
    still surround it. The compiled forward is inside the recomputed one.
    """
    names = set(getattr(model, "_no_split_modules", None) or ())
    # FSDP gives a module that it has sharded a class of its own.
    kinds = ((type(module).__name__.removeprefix("FSDP"), module) for module in model.modules())
    blocks = [module for kind, module in kinds if kind in names]
    if not blocks and (recomputed or compiled):
        raise ConfigError(
            f"trainer.activation_checkpointing and trainer.compile work block by block, and "
            f"{type(model).__name__} does not say which modules are its blocks. Set both off."
        )

    if compiled:
        check_compiler(device)
    chain = Chain()
    for number, block in enumerate(blocks):
        vars(block).pop("forward", None)  # of an earlier call
        forward: Callable[..., Any] = block.forward
        if compiled:
            forward = torch.compile(forward, dynamic=True)
        if recomputed and number % recomputed == 0:
            forward = recompute(forward, keeps_attention, chain=chain if offloads else None)
        vars(block)["forward"] = forward


def recompute(
    forward: Callable[..., Any], keeps_attention: bool, chain: Chain | None
) -> Callable[..., Any]:
    """``forward``, recomputed in the backward pass. ``chain``: its first argument waits for that on
    the host."""
    # Nothing is drawn at random: the policy trains without dropout.
    options: dict[str, Any] = {
        "use_reentrant": False,
        "preserve_rng_state": False,
        "context_fn": _keeping_contexts if keeps_attention else same_choices,
    }
    if chain is None:
        return partial(checkpoint, forward, **options)

    @wraps(forward)
    def offloaded(hidden: Tensor, *others: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():  # nothing is kept
            return forward(hidden, *others, **named)
        return checkpoint_offloaded(chain, forward, hidden, *others, **named, **options)

    return offloaded


def _keeping_contexts() -> tuple[Context, Context]:
    """Contexts of both passes. The second keeps the attention of the first."""
    kept = create_selective_checkpoint_contexts(_keep_attention)  # type: ignore[no-untyped-call]
    first, second = (_nested(*each) for each in zip(same_choices(), kept, strict=True))
    return first, second


@contextmanager
def _nested(outer: Context, inner: Context) -> Iterator[None]:
    with outer, inner:
        yield


def _keep_attention(_: Any, operation: Any, *__: Any, **___: Any) -> CheckpointPolicy:
    packet = getattr(operation, "overloadpacket", None)
    if getattr(packet, "__name__", "") in ATTENTION:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


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
