"""``[monitors.file] interval`` for the files to which the trainer adds a line per step:
``trainer.jsonl``, which the orchestrator follows, and ``expert_load.jsonl``.

The trainer writes whole lines. This shortens old ones in the trainer's process, between two steps,
and replaces the file. The orchestrator then reads it from its start, and knows which steps it has
seen.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
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
    """Shortens ``trainer.jsonl`` and ``expert_load.jsonl``, as ``[monitors.file] interval`` says:
    old lines of other steps than each so many lose their details, or are left out."""

    name = "step_file"

    def __init__(self, config: PluginConfig) -> None:
        super().__init__(config)
        self._interval = 1
        self._sizes: Counter[Path] = Counter()
        """Bytes of each file when it was last shortened."""
        self._steps: Counter[Path] = Counter()
        """Steps since then."""

    def started(self, trainer: Trainer, run_dir: Path) -> None:
        """Read the interval from the run's config."""
        self._metrics = run_dir / "trainer.jsonl"
        self._loads = run_dir / "expert_load.jsonl"
        self._interval = _interval(run_dir / "configs" / "run.json")

    def step_done(self, step: int, metrics: Mapping[str, float]) -> None:
        """Once a file has doubled, so that the work stays in proportion to it."""
        if self._interval == 1:
            return
        for path in (self._metrics, self._loads):
            self._steps[path] += 1
            if self._steps[path] >= 2 * NEWEST:
                with suppress(OSError):  # a full disk: the trainer's next line says so
                    self._shorten(path)

    def _shorten(self, path: Path) -> None:
        from prime_rl.trainer import parallel

        before = path.stat()
        if parallel.rank() or before.st_size < 2 * self._sizes[path]:
            return

        *whole, rest = path.read_bytes().split(b"\n")
        lines = [line + b"\n" for line in whole]
        old = [self.short(line, is_load=path == self._loads) for line in lines[:-NEWEST]]
        new = lines[-NEWEST:]
        shorter = path.with_name(f".{path.name}.{os.getpid()}")
        shorter.write_bytes(b"".join([*old, *new, rest]))
        if path.stat().st_ino != before.st_ino:  # another attempt has gone back
            shorter.unlink()
            return

        shorter.replace(path)
        self._sizes[path] = path.stat().st_size
        self._steps[path] = 0

    def short(self, line: bytes, is_load: bool = False) -> bytes:
        """A line without details, or nothing of the load of experts, unless its step keeps it. A
        damaged line stays as it is."""
        try:
            row = json.loads(line)
            if row["step"] % self._interval == 0:
                return line
            if is_load:
                return b""
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
