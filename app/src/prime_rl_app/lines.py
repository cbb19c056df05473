"""``[view] type = "lines"``: a line when a process reports another state."""

from __future__ import annotations

from typing import ClassVar

from prime_rl.plugins.view import RunView
from prime_rl.rundir.checkpoints import durable


class LinesView(RunView):
    """The base class, which also says what a run that was stopped at once keeps."""

    name: ClassVar[str] = "lines"

    def stopped(self, step: int | None, saved: bool, command: str) -> None:
        """Print what a resume repeats."""
        said = "stopped" if saved else f"stopped; {durable(self.run_dir)}"
        self.print(f"{said}: {self.run_dir}")
