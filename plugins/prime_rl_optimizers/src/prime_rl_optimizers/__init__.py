"""Optimizers of the policy besides AdamW: ``adamw_offload``, ``muon``, ``pcgrad``, ``sgd``,
``sign_sgd``."""

from __future__ import annotations

from prime_rl import OptimizerMaker, hookimpl
from prime_rl_optimizers.makers import (
    MuonMaker,
    OffloadedAdamWMaker,
    PCGradMaker,
    SgdMaker,
    SignSgdMaker,
)


@hookimpl
def register_optimizers() -> list[type[OptimizerMaker]]:
    return [OffloadedAdamWMaker, MuonMaker, PCGradMaker, SgdMaker, SignSgdMaker]
