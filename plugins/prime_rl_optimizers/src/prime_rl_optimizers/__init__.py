"""Optimizers of the policy besides AdamW: ``muon``, ``sgd`` and ``sign_sgd``."""

from __future__ import annotations

from prime_rl import OptimizerMaker, hookimpl
from prime_rl_optimizers.makers import MuonMaker, SgdMaker, SignSgdMaker


@hookimpl
def register_optimizers() -> list[type[OptimizerMaker]]:
    return [MuonMaker, SgdMaker, SignSgdMaker]
