"""Losses that bound how far one batch moves the policy. This module does not import torch."""

from __future__ import annotations

from prime_rl import Loss, hookimpl
from prime_rl_clip_losses.cispo import CISPOLoss
from prime_rl_clip_losses.covariance import ClipCovLoss, KLCovLoss
from prime_rl_clip_losses.decoupled import (
    DecoupledPPOLoss,
    GeometricMaskLoss,
    IcePopLoss,
    TISLoss,
)
from prime_rl_clip_losses.ppo_clip import PPOClipLoss
from prime_rl_clip_losses.sapo import SAPOLoss
from prime_rl_clip_losses.sequence import GMPOLoss, GSPOLoss

LOSSES: list[type[Loss]] = [
    *(PPOClipLoss, CISPOLoss, SAPOLoss, GSPOLoss, GMPOLoss),
    *(DecoupledPPOLoss, TISLoss, IcePopLoss, GeometricMaskLoss),
    *(ClipCovLoss, KLCovLoss),
]


@hookimpl
def register_losses() -> list[type[Loss]]:
    return LOSSES
