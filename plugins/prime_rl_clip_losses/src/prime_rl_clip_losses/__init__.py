"""Two clipped losses, packaged like a third-party plugin. This module does not import torch."""

from __future__ import annotations

from prime_rl import Loss, hookimpl
from prime_rl_clip_losses.cispo import CISPOLoss
from prime_rl_clip_losses.ppo_clip import PPOClipLoss


@hookimpl
def register_losses() -> list[type[Loss]]:
    return [PPOClipLoss, CISPOLoss]
