"""``[monitors.file] interval`` for ``trainer.jsonl``, which the orchestrator follows.

The trainer writes whole lines. This shortens old ones in the trainer's process, between two steps,
and replaces the file. The orchestrator then reads it from its start, and knows which steps it has
seen.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from prime_rl import PluginConfig, TrainerObserver

if TYPE_CHECKING:
    from prime_rl.trainer.loop import Trainer

DETAILS = re.compile("/(min|max|p10|p90|median|std|sum|n)$")
"""Metrics of a trainer that a shortened line leaves out, as in ``metrics.jsonl``."""
NEWEST = 100
"""Lines that stay whole: the orchestrator is a few steps behind at most."""


class StepFile(TrainerObserver):
    """Shortens old lines of ``trainer.jsonl``, as ``[monitors.file] interval`` says."""

    name = "step_file"

    def __init__(self, config: PluginConfig) -> None:
        super().__init__(config)
        self._interval = 1
        self._shortened = 0
        self._steps = 0

    def started(self, trainer: Trainer, run_dir: Path) -> None:
        """Read the interval from the run's config."""
        self._path = run_dir / "trainer.jsonl"
        self._interval = _interval(run_dir / "configs" / "run.json")

    def step_done(self, step: int, metrics: Mapping[str, float]) -> None:
        """Once the file has doubled, so that the work stays in proportion to it."""
        self._steps += 1
        if self._interval == 1 or self._steps < 2 * NEWEST:
            return
        from prime_rl.trainer import parallel

        with suppress(OSError):  # a full disk: the trainer's next line says so
            before = self._path.stat()
            if parallel.rank() or before.st_size < 2 * self._shortened:
                return
            *whole, rest = self._path.read_bytes().split(b"\n")
            lines = [line + b"\n" for line in whole]
            old = lines[:-NEWEST]
            new = lines[-NEWEST:]
            shorter = self._path.with_name(f".{self._path.name}.{os.getpid()}")
            shorter.write_bytes(b"".join([*map(self.short, old), *new, rest]))
            if self._path.stat().st_ino != before.st_ino:  # another attempt has gone back
                shorter.unlink()
                return

            shorter.replace(self._path)
            self._shortened = self._path.stat().st_size
            self._steps = 0

    def short(self, line: bytes) -> bytes:
        """A line without details, unless its step keeps them. A damaged line stays as it is."""
        try:
            row = json.loads(line)
            if row["step"] % self._interval == 0:
                return line
            row["metrics"] = {n: v for n, v in row["metrics"].items() if not DETAILS.search(n)}
            return json.dumps(row).encode() + b"\n"
        except (AttributeError, LookupError, RecursionError, TypeError, ValueError):
            return line


def _interval(path: Path) -> int:
    """``[monitors.file] interval`` of a run's config; 1, which shortens nothing, where there is no
    run or it has another monitor."""
    try:
        config = json.loads(path.read_text("utf-8-sig"))
        interval = config["monitors"]["file"]["interval"]
    except (OSError, ValueError, LookupError, RecursionError, TypeError):
        return 1
    return interval if isinstance(interval, int) and interval > 0 else 1
