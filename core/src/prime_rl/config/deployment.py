"""``[deployment]``: which GPUs and machines the processes of a run get."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, NonNegativeInt, PositiveInt

from prime_rl.config.base import Settings

GpuList = Annotated[tuple[NonNegativeInt, ...], Field(min_length=1)]


class DeploymentConfig(Settings):
    """``[deployment]``: who gets which GPU, and how many machines train. Where there is no GPU, or
    one and no word of who gets it, none is handed out: all see what there is."""

    colocated: bool = False
    """Engine and trainer share the same GPUs and take turns in their memory."""
    inference_gpus: GpuList | None = None
    """Numbers of the GPUs of the engines, among those that ``CUDA_VISIBLE_DEVICES`` leaves.
    Replicas get equal shares, in order. None: those the trainer does not have."""
    trainer_gpus: GpuList | None = None
    """Numbers of the GPUs of the trainer, one a rank. None: the last ``trainer.num_ranks``, or one;
    where ``inference_gpus`` is set or engines run elsewhere, all the others."""
    trainer_nodes: PositiveInt = 1
    """Machines the trainer's ranks are spread over; the launcher must place on that many."""
