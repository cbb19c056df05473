"""``metrics.jsonl``: one line a step and process, ``{"step": 3, "time": ...,
"train/all/reward/mean": 0.6, ...}``."""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path

from prime_rl.plugins.base import Monitor, PluginConfig

log = logging.getLogger(__name__)


class FileMonitor(Monitor):
    """Appends to ``<run>/metrics.jsonl``. What a full disk refuses is tried again with the next
    line; half a line never stays."""

    name = "file"
    in_background = False  # the live view and the summary read the file while the run goes on

    def __init__(self, config: PluginConfig, run_dir: Path) -> None:
        super().__init__(config, run_dir)
        self._file = (run_dir / "metrics.jsonl").open("ab", buffering=0)
        self._unwritten = b""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one line; a value that is not finite becomes null, because JSON has no name for
        it. Raises ``OSError``."""
        finite = {k: v if math.isfinite(v) else None for k, v in metrics.items()}
        line = json.dumps({"step": step, "time": time.time(), **finite})
        self._unwritten += f"{line}\n".encode()
        self._write()

    def close(self) -> None:
        """Close the file."""
        try:
            self._write()
        except OSError as error:
            log.error("the last metrics are not in %s: %s", self._file.name, error)
        self._file.close()

    def _write(self) -> None:
        size = os.fstat(self._file.fileno()).st_size
        try:
            left = memoryview(self._unwritten)
            while left:
                left = left[self._file.write(left) :]
        except OSError:
            os.truncate(self._file.fileno(), size)
            raise
        self._unwritten = b""
