"""Metric names for Prometheus."""

from __future__ import annotations

import re
from functools import cache

TRAINER = {
    "trainer_loss": "loss/mean",
    "trainer_throughput_tokens_per_sec": "perf/throughput",
    "trainer_grad_norm": "optim/grad_norm",
    "trainer_peak_memory_gib": "perf/peak_memory",
    "trainer_learning_rate": "optim/lr",
    "trainer_mfu_percent": "perf/mfu",
    "trainer_entropy": "entropy/all/mean",
    "trainer_mismatch_kl": "mismatch_kl/all/mean",
    "trainer_kl_ent_ratio": "kl_ent_ratio/mean",
}
"""Names that dashboards of other trainers use, and our metric for each."""


@cache
def mangle(name: str) -> str:
    """``eval/my-env/pass@4`` -> ``prime_rl_eval_my_env_pass_at_4``. ``pass^4`` differs from
    ``pass@4``, and ``a:rate`` from ``a/rate``."""
    spelled = (
        name.replace("@", "_at_").replace("^", "_all_").replace(":", "_per_").replace("%", "pct")
    )
    return "prime_rl_" + re.sub(r"[^a-zA-Z0-9_]", "_", spelled)
