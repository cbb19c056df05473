"""Optimizers of the policy besides AdamW: ``adamw_offload``, ``muon``, ``sgd``, ``sign_sgd``."""

from __future__ import annotations

from prime_rl import OptimizerMaker, hookimpl
from prime_rl_optimizers.makers import MuonMaker, OffloadedAdamWMaker, SgdMaker, SignSgdMaker


@hookimpl
def register_optimizers() -> list[type[OptimizerMaker]]:
    return [OffloadedAdamWMaker, MuonMaker, SgdMaker, SignSgdMaker]
