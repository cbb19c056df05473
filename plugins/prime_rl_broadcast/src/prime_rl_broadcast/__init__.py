"""Weights from the trainer's memory into the engines', over a process group (gloo or NCCL)
or through shared memory (ipc).

    trainer       <run>/broadcasts/step_7/MEMORY              version 7 is in memory; then STABLE
    orchestrator  <run>/broadcasts/step_7/meeting.json        the group: members and folders
    all           <run>/broadcasts/meetings/ID/here_RANK      rank 0 is the trainer's, then engines
    trainer  ==>  header, then all tensors by their Hugging Face names  ==>  engines

If a member is missing or refuses, the broadcast ends before any engine has touched its weights.
``group`` imports no torch; ``connection`` sends and receives, and ``ipc`` does so in shared memory.
"""

from __future__ import annotations

from prime_rl import WeightTransport, hookimpl
from prime_rl_broadcast.transport import GlooTransport, IpcTransport, NcclTransport


@hookimpl
def register_weight_transports() -> list[type[WeightTransport]]:
    """Offer ``gloo``, ``nccl`` and ``ipc``."""
    return [GlooTransport, NcclTransport, IpcTransport]
