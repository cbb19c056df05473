"""How the trainer computes packed rows: attention, shared prompts and a fused LM head."""

from __future__ import annotations

from prime_rl import Kernel, hookimpl
from prime_rl_kernels.kernels import Auto, Mask, Varlen


@hookimpl
def register_kernels() -> list[type[Kernel]]:
    """Offer ``auto``, ``varlen`` and ``mask``."""
    return [Auto, Mask, Varlen]
