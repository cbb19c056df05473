"""Weights from the trainer's memory into the engines', over a process group (gloo or NCCL).

    trainer       <run>/broadcasts/step_7/MEMORY              version 7 is in memory; then STABLE
    orchestrator  <run>/broadcasts/step_7/meeting.json        which engines take it, and where
    all           <run>/broadcasts/meetings/ID/here_RANK      trainer rank 0 is 0, engines follow
    trainer  ==>  header, then all tensors by their Hugging Face names  ==>  engines

A member that does not come, or refuses, ends a meeting before any engine has touched its weights.
``meeting`` imports no torch; ``group`` sends and receives.
"""

from __future__ import annotations

from prime_rl import WeightTransport, hookimpl
from prime_rl_broadcast.transport import GlooTransport, NcclTransport


@hookimpl
def register_weight_transports() -> list[type[WeightTransport]]:
    """Offer ``gloo`` and ``nccl``."""
    return [GlooTransport, NcclTransport]
