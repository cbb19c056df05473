"""The losses that belong to a baseline: PPO's clipped surrogate, each with its own divisor.

    grpo_std    the tokens of each rollout are averaged, then the rollouts
    dr_grpo     the sum over tokens, divided by a constant that the run must set
    dapo        the sum over tokens, divided by the tokens of the batch; clip 0.2 and 0.28

Formula, sign and metrics are those of ``ppo_clip`` (prime-rl-clip-losses). A run that sets another
divisor for ``grpo_std`` or ``dr_grpo`` is refused. This module does not import torch.
"""

from __future__ import annotations

from dataclasses import replace

from pydantic import NonNegativeFloat

from prime_rl import Loss, LossInputs, LossOutputs, hookimpl
from prime_rl_baselines.penalties import EntropyBonusLoss, KLToInitialLoss
from prime_rl_clip_losses.ppo_clip import PPOClipConfig, PPOClipLoss


class GRPOClipConfig(PPOClipConfig):
    """``[trainer.losses.grpo_std]`` and ``[trainer.losses.dr_grpo]``: the keys of ``ppo_clip``."""


class GRPOStdLoss(PPOClipLoss):
    """1 / |o| of the original GRPO: the mean over a rollout's tokens, summed over rollouts."""

    name = "grpo_std"
    config_class = GRPOClipConfig
    token_wise = False
    scope = "rollout"
    normalize_by = "rollouts"

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        """One rollout."""
        import torch

        share = 1 / inputs.loss_mask.sum().clamp(min=1)
        weights = inputs.loss_weights
        scaled = share * (torch.ones_like(inputs.advantages) if weights is None else weights)
        return super().__call__(replace(inputs, loss_weights=scaled))


class DrGRPOLoss(PPOClipLoss):
    """Each token counts alike, whatever the length of its rollout."""

    name = "dr_grpo"
    config_class = GRPOClipConfig
    normalize_by = "constant"


class DAPOLossConfig(PPOClipConfig):
    """``[trainer.losses.dapo]``"""

    clip_eps_high: NonNegativeFloat = 0.28
    """With a positive advantage, a token stops training once its ratio is above 1 plus this."""


class DAPOLoss(PPOClipLoss):
    """Clip-higher, token mean."""

    name = "dapo"
    config_class = DAPOLossConfig


@hookimpl
def register_losses() -> list[type[Loss]]:
    return [GRPOStdLoss, DrGRPOLoss, DAPOLoss, EntropyBonusLoss, KLToInitialLoss]
