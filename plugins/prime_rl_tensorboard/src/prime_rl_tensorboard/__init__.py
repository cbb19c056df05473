"""TensorBoard: ``[monitors.tensorboard]`` writes metrics as scalars of an event file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import Field

from prime_rl import Monitor, PluginConfig, hookimpl
from prime_rl_tensorboard.events import EventFile


class TensorBoardConfig(PluginConfig):
    """``[monitors.tensorboard]``"""

    folder: Annotated[str, Field(pattern=r"^[\w.-]+$")] = "tensorboard"
    """Folder of the event files, inside the run directory."""


class TensorBoardMonitor(Monitor):
    """One scalar per metric, at its own step."""

    name = "tensorboard"
    config_class = TensorBoardConfig

    def __init__(self, config: PluginConfig, run_dir: Path) -> None:
        super().__init__(config, run_dir)
        assert isinstance(config, TensorBoardConfig)
        self._file = EventFile(run_dir / config.folder)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one event, without values that are not finite."""
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        self._file.write(step, finite)

    def close(self) -> None:
        self._file.close()


@hookimpl
def register_observers() -> list[type[Monitor]]:
    return [TensorBoardMonitor]
