"""The monitor ``file``, which the live view, the summary and the report read."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path

from pydantic import PositiveInt

from prime_rl import Monitor, PluginConfig, hookimpl

DETAILS = re.compile(
    r"^inference/|^(?!eval/).*(/effective/|/timing/|/(min|max|p10|p90|median|std|sum|n)$)"
)
"""Metrics that are left out between whole lines; evaluations stay."""


class FileConfig(PluginConfig):
    """``[monitors.file]``"""

    interval: PositiveInt = 1
    """Steps between lines with every metric (25 KB each). Those of other steps have the means (4
    KB), without the engines' own metrics, timing and ``effective``. Old lines of ``trainer.jsonl``
    become as short, and those of ``expert_load.jsonl`` are left out."""


class FileMonitor(Monitor):
    """Appends to ``<run>/metrics.jsonl``; a line is written whole or not at all."""

    name = "file"
    config_class = FileConfig
    in_background = False  # views read the file during the run

    def __init__(self, config: PluginConfig, run_dir: Path) -> None:
        super().__init__(config, run_dir)
        self._interval = config.interval if isinstance(config, FileConfig) else 1
        self._file = (run_dir / "metrics.jsonl").open("ab", buffering=0)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one line; a value that is not finite becomes null, because JSON has no name for
        it. Raises ``OSError`` if the disk does not take the line."""
        whole = step % self._interval == 0
        finite = {
            name: value if math.isfinite(value) else None
            for name, value in metrics.items()
            if whole or not DETAILS.search(name)
        }
        line = f"{json.dumps({'step': step, 'time': time.time(), **finite})}\n".encode()
        written = self._file.write(line)
        if written < len(line):  # torn lines would break every reader of the file
            os.truncate(self._file.fileno(), os.fstat(self._file.fileno()).st_size - written)
            raise OSError(errno.ENOSPC, "no room for a line", self._file.name)

    def close(self) -> None:
        self._file.close()


@hookimpl
def register_observers() -> list[type[Monitor]]:
    """Offer ``file``."""
    return [FileMonitor]
