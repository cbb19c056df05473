"""LoRA: train small matrices beside the frozen weights of the policy."""

from __future__ import annotations

from prime_rl import Tuning, hookimpl
from prime_rl_lora.tuning import Lora


@hookimpl
def register_tunings() -> list[type[Tuning]]:
    """Offer ``lora``."""
    return [Lora]
