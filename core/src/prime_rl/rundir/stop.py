"""A graceful stop: the run ends with the step that is being trained, and saves its state.

    first signal -> supervisor creates <run>/STOP
                 -> orchestrator: no more rollouts, its part of the checkpoint, a batch without rows
                 -> trainer: finishes the batches it was sent, checkpoint, ``weights/``
                 -> orchestrator: the last step in its status
    second signal -> every process ends at once

The request is a file because every process sees the run directory, on any machine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from prime_rl.rundir.status import DONE, Status, read_status

STOP = "STOP"
"""Marker file in the run directory: a stop is requested."""
POLL_SECONDS = 0.1


class Stopped(KeyboardInterrupt):
    """The user has stopped the run gracefully."""

    def __init__(self, step: int, trained: bool) -> None:
        """``step``: the last step. ``trained``: this attempt has trained and saved a step."""
        super().__init__()
        self.step, self.trained = step, trained


class Stop:
    """The supervisor's side of a stop. ``asked``: whether the user wants the run to end."""

    def __init__(
        self, run_dir: Path, first_step: int, asked: Callable[[], bool], tell: Callable[[str], None]
    ) -> None:
        self._run_dir, self._first_step = run_dir, first_step
        self._asked, self._tell = asked, tell

    @property
    def is_asked(self) -> bool:
        """Whether the run must end. The first time, this asks the orchestrator to stop."""
        marker = self._run_dir / STOP
        if self._asked() and not marker.exists():
            self._tell("stopping: saving weights (again: now)")
            marker.touch()
        return self._asked()

    @property
    def result(self) -> Stopped | None:
        """The outcome, once the orchestrator is done; None if the run finished all its steps."""
        report = read_status(self._run_dir / "status" / "orchestrator.json")
        if report is None or report.state != DONE or "last_step" not in report.detail:
            return None
        step = int(report.detail["last_step"])
        return Stopped(step, trained=step >= self._first_step)


def report_stopped(status: Status, last_step: int) -> None:
    """Report that the orchestrator of a stopped run is done, for ``Stop.result``."""
    status.report(DONE, last_step=last_step)


async def stop_asked(run_dir: Path) -> None:
    while not (run_dir / STOP).exists():
        await asyncio.sleep(POLL_SECONDS)
