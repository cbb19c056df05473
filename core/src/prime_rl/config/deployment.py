"""``[launcher]`` and ``[deployment]``: where the processes of a run start, and on which GPUs."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, NonNegativeInt, PositiveInt

from prime_rl.config.base import PluginTable, Settings

GpuList = Annotated[tuple[NonNegativeInt, ...], Field(min_length=1)]


class LauncherConfig(PluginTable):
    """``[launcher]``: starts the processes of a run. Its other keys belong to the launcher."""

    type: str = "local"
    """Name of an installed launcher. ``prime-rl run --launcher NAME`` sets it too."""


class DeploymentConfig(Settings):
    """``[deployment]``: GPUs of engines and trainer, and machines of the trainer. With no GPU, or
    with one that is assigned to neither, every process sees what there is."""

    colocated: bool = False
    """Engine and trainer share the same GPUs and take turns in their memory."""
    inference_gpus: GpuList | None = None
    """GPU numbers of the engines, among those in ``CUDA_VISIBLE_DEVICES``. Replicas get equal
    shares, in order. None: all that the trainer does not have."""
    trainer_gpus: GpuList | None = None
    """GPU numbers of the trainer, one per rank. None: the last ``trainer.num_ranks``, or one; all
    the others if ``inference_gpus`` is set or the engines run elsewhere."""
    trainer_nodes: PositiveInt = 1
    """Machines the trainer's ranks are spread over; the launcher must support that many."""
