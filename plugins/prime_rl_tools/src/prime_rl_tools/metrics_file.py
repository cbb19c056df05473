"""The monitor ``file``, which the live view, the summary and the report read."""

from __future__ import annotations

import errno
import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path

from prime_rl import Monitor, PluginConfig, hookimpl


class FileMonitor(Monitor):
    """Appends to ``<run>/metrics.jsonl``; a line is written whole or not at all."""

    name = "file"
    in_background = False  # views read the file during the run

    def __init__(self, config: PluginConfig, run_dir: Path) -> None:
        super().__init__(config, run_dir)
        self._file = (run_dir / "metrics.jsonl").open("ab", buffering=0)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one line; a value that is not finite becomes null, because JSON has no name for
        it. Raises ``OSError`` if the disk does not take the line."""
        finite = {k: v if math.isfinite(v) else None for k, v in metrics.items()}
        line = f"{json.dumps({'step': step, 'time': time.time(), **finite})}\n".encode()
        written = self._file.write(line)
        if written < len(line):  # torn lines would break every reader of the file
            os.truncate(self._file.fileno(), os.fstat(self._file.fileno()).st_size - written)
            raise OSError(errno.ENOSPC, "no room for a line", self._file.name)

    def close(self) -> None:
        self._file.close()


@hookimpl
def register_monitors() -> list[type[Monitor]]:
    """Offer ``file``."""
    return [FileMonitor]
