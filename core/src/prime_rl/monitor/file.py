"""``metrics.jsonl``: one line a step and process, ``{"step": 3, "time": ...,
"train/all/reward/mean": 0.6, ...}``."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path

from prime_rl.plugins.base import Monitor, PluginConfig


class FileMonitor(Monitor):
    """Appends to ``<run>/metrics.jsonl``."""

    name = "file"
    in_background = False  # the live view and the summary read the file while the run goes on

    def __init__(self, config: PluginConfig, run_dir: Path) -> None:
        super().__init__(config, run_dir)
        self._file = (run_dir / "metrics.jsonl").open("a", buffering=1)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one line; a value that is not finite becomes null, because JSON has no name for
        it."""
        finite = {k: v if math.isfinite(v) else None for k, v in metrics.items()}
        self._file.write(json.dumps({"step": step, "time": time.time(), **finite}) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()
