"""Two clipped losses, as a third party would ship them. Importing this brings in no torch."""

from __future__ import annotations

from prime_rl import Loss, hookimpl
from prime_rl_clip_losses.cispo import CISPOLoss
from prime_rl_clip_losses.ppo_clip import PPOClipLoss


@hookimpl
def register_losses() -> list[type[Loss]]:
    """Offer ``ppo_clip`` and ``cispo``."""
    return [PPOClipLoss, CISPOLoss]
