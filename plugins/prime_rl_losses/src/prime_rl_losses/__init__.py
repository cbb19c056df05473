"""The losses that ship with prime-rl. This module does not import torch."""

from __future__ import annotations

from prime_rl import Loss, hookimpl
from prime_rl_losses.custom import CustomLoss
from prime_rl_losses.distill import CrossEntropy, ReferenceKL, TopKL
from prime_rl_losses.trust_region import DefaultLoss, IPOLoss


@hookimpl
def register_losses() -> list[type[Loss]]:
    return [DefaultLoss, IPOLoss, CustomLoss, CrossEntropy, ReferenceKL, TopKL]
