"""SDFT: self-distillation from a slow copy of the policy that has seen a demonstration (Shenfeld et
al. 2026, arXiv:2601.19897).

    y ~ pi(. | x)        g_t = log e(y_t | d, x, y_<t) - log pi(y_t | x, y_<t)

on the tokens that the policy sampled: the reverse KL to the teacher e (component ``ref_kl``), which
reads the demonstration d in a system message. e is the moving average of the policy's weights, or
the weights that the run began with, so that the teacher does not follow each step of the policy, as
it does in ``opsd``.

Changed from the paper: 1. g is the estimate from the sampled token, not the sum over the
vocabulary; 2. a truncated rollout is skipped; 3. pi in g is the current policy, and a token whose
probability has fallen by more than 0.2 is dropped. The reverse KL and the demonstration were
checked in the abstract and in summaries of the paper, the average in others' code for it; the
equations of the paper could not be checked.
"""

from __future__ import annotations

from typing import Literal

from prime_rl import Host, PluginConfig
from prime_rl_distill.opsd import OPSD, OPSDConfig


class SDFTConfig(OPSDConfig):
    """Settings of ``sdft``: those of ``opsd``, and whose weights the teacher has."""

    reference: Literal["ema", "initial"] = "ema"
    """``ema``: the moving average of the policy (``trainer.ema_decay``). ``initial``: the weights
    that the run began with."""
    min_gain: float | None = None
    """As in ``opsd``: train on an example only while the demonstration raises the logprob of the
    expert's own reply by more than this, from the policy to the teacher. None: always."""


class SDFT(OPSD):
    """The signal is the teacher's logprob of each token, given the demonstration, minus the
    policy's."""

    name = "sdft"
    config_class = SDFTConfig
    config: SDFTConfig

    def __init__(self, config: PluginConfig) -> None:
        super().__init__(config)
        self.needs_ema = self.config.reference == "ema"
        self.needs_initial = not self.needs_ema

    async def setup(self, host: Host) -> None:
        await super().setup(host)
        self.reference = host.ema if self.needs_ema else host.initial
