"""What ``prime-rl doctor`` says of a run in progress, for the live view and the summary."""

from __future__ import annotations

from pathlib import Path
from threading import Thread

from rich.text import Text

from prime_rl.errors import PrimeRLError
from prime_rl_tools.doctor import EVERY, Verdict, diagnose

MOST = 3
"""Findings that the view shows."""


class Findings:
    """The verdicts on a run. A thread reads them again after ``EVERY`` further steps, and at least
    a tenth more of them: each look reads all steps, so looks at a fixed distance would grow
    costly."""

    def __init__(self, run_dir: Path, step: int) -> None:
        """``step``: the last one that previous attempts have trained."""
        self.found: list[Verdict] = []
        self._run_dir = run_dir
        self._next = (step // EVERY + 1) * EVERY
        self._thread: Thread | None = None
        self._said: set[tuple[str, str | None]] = set()

    def update(self, step: int) -> None:
        """Start the thread if it is time and none is running."""
        if step >= self._next and not (self._thread and self._thread.is_alive()):
            self._next = max(step // EVERY * EVERY + EVERY, step + step // 10)
            self._thread = Thread(target=self.read, name="doctor", daemon=True)
            self._thread.start()

    def read(self) -> None:
        """Diagnose the run now. A file that cannot be read (the run prunes and writes meanwhile)
        gives no verdict."""
        try:
            self.found = diagnose(self._run_dir)
        except (PrimeRLError, OSError):
            self.found = []

    def new(self) -> list[Verdict]:
        """The verdicts that an earlier call has not returned."""
        new = [each for each in self.found if (each.name, each.env) not in self._said]
        self._said |= {(each.name, each.env) for each in new}
        return new

    def render(self) -> Text | None:
        """One line per finding; None without findings."""
        findings = self.found
        if not findings:
            return None
        lines = [Text(each.line, "yellow") for each in findings[:MOST]]
        more = f"and {len(findings) - MOST} more; " if len(findings) > MOST else ""
        command = f"{more}why, and what to change: prime-rl doctor {self._run_dir.name}"
        return Text("\n").join([*lines, Text(command, "dim")])
