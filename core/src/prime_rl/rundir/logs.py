"""The form of the lines that a process of a run logs: text, or JSON (``log.json_logging``)."""

from __future__ import annotations

import json
import logging
import os
from datetime import UTC, datetime

from prime_rl.rundir.attempts import identity

JSON_LOGS = "PRIME_RL_JSON_LOGS"
"""Environment variable, ``1``: lines are JSON. All processes of a run get it, engines included."""

TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class JsonLines(logging.Formatter):
    """One object per line: ``time`` (ISO 8601, UTC), ``level``, ``process``, ``logger``,
    ``message``; ``rank`` of a trainer of several, and ``exception`` if the record has one."""

    def __init__(self, rank: int | None = None) -> None:
        super().__init__()
        mine = identity(os.environ)
        self._about: dict[str, object] = {} if mine is None else {"process": mine[1]}
        if rank is not None:
            self._about["rank"] = rank

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end."""
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            **self._about,
            "logger": record.name,
            "message": record.getMessage(),
        }

        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def set_up_logging(level: str = "info", rank: int | None = None) -> None:
    """Log to stderr, in the form of this run. ``rank``: the rank of one of several trainers, except
    rank 0."""
    logging.basicConfig(
        level=level.upper(), format=TEXT if rank is None else f"[rank {rank}] {TEXT}"
    )

    if os.environ.get(JSON_LOGS) == "1":
        for handler in logging.getLogger().handlers:
            handler.setFormatter(JsonLines(rank))
