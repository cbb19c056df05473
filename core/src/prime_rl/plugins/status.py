"""What a process of a run says of itself: texts for people, as a view shows them, and facts that
programs decide by."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

STARTING = "starting"
"""State of a process that has said nothing yet, and of an engine that has not served yet."""

SUPERVISOR = "supervisor"
"""Name in the folder of the statuses of a file that is none: the supervisor's record."""

FACTS = "facts"
"""Key of ``detail`` in the file, with the facts as JSON: an older reader shows it as a text."""


@dataclass(frozen=True, kw_only=True)
class EngineFacts:
    """One engine, as the orchestrator sees it."""

    version: int | None = None
    """The version of the weights that it serves. None: it serves none now."""
    has_served: bool = False
    silence: int | None = None
    """It accepts connections and answers nothing: the number of this silence, from 1, so that each
    is handled once. None: it answers, or accepts none."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What recovery and restarts decide by."""

    waits_for: Literal["orchestrator", "engines"] | None = None
    """The part of the run that the trainer waits for."""
    engines: dict[str, EngineFacts] = field(default_factory=dict)
    """The policy's engines by name, in the orchestrator's report."""
    fault: Literal["plugin", "other_rank"] | None = None
    """Why a process failed: by a plugin, which the error names, or because another rank of the
    trainer had failed before."""

    @property
    def newest_version(self) -> int | None:
        """The newest version that an engine serves; None: none serves."""
        versions = [each.version for each in self.engines.values() if each.version is not None]
        return max(versions, default=None)


@dataclass(frozen=True)
class StatusReport:
    """One line of the live view."""

    state: str = STARTING
    """What the process does now, in a few words: ``loading weights``."""
    progress: float | None = None
    """Share done, 0 to 1, of something that takes more than two seconds."""
    waiting_for: str | None = None
    """What the process waits for, if it waits: ``trainer (weights of step 7)``."""
    detail: dict[str, float | str] = field(default_factory=dict)
    """Numbers to show beside the state."""
    pid: int = 0
    time: float = 0.0
    """Seconds since the epoch at which this was written."""
    facts: Facts = field(default_factory=Facts)

    def to_json(self) -> str:
        """The file's text."""
        table = asdict(self)
        facts = msgspec.json.encode(table.pop(FACTS)).decode()
        if self.facts != Facts():
            table["detail"] = {**self.detail, FACTS: facts}
        return json.dumps(table)


def read_status(path: Path) -> StatusReport | None:
    """The last report in ``path``; None if there is none yet or it cannot be read now (on NFS a
    file that is being replaced may vanish under the reader)."""
    try:
        table: dict[str, Any] = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        if "state" not in table:  # a key that we do not know may be of a newer version
            return None

        detail = dict(table.get("detail", {}))
        facts = msgspec.json.decode(str(detail.pop(FACTS, "{}")), type=Facts)
        table |= {"detail": detail, FACTS: asdict(facts)}
        return msgspec.convert(table, StatusReport)  # with values of the right types
    except (OSError, ValueError, TypeError, RecursionError):
        return None
