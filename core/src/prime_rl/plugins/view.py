"""Views show a run to the user who started it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

from prime_rl.errors import printable
from prime_rl.plugins.base import Offer, PluginConfig
from prime_rl.plugins.status import SUPERVISOR, StatusReport, read_status


class RunView(Offer):
    """Shows a run, from the files in its directory. A context manager around the run. The base
    class, ``lines``, prints a line when a process reports another state."""

    name: ClassVar[str] = "lines"

    def __init__(self, config: PluginConfig, run_dir: Path, max_steps: int) -> None:
        super().__init__(config)
        self.run_dir = run_dir
        self.max_steps = max_steps
        self._printed: dict[str, str] = {}

    def __enter__(self) -> RunView:
        return self

    def __exit__(self, *exc: object) -> None:
        """The processes of the run have ended, however they did."""

    def refresh(self) -> None:
        """Show the current state. Called several times per second."""
        for name, report in self.reports():
            waits = f" (waits for {report.waiting_for})" if report.waiting_for else ""
            news = f"{report.state}{waits}"
            # Only changes are printed: `refresh` is called several times per second.
            if self._printed.get(name) != news:
                self._printed[name] = news
                self.print(f"{name}: {news}")

    def reports(self) -> Iterator[tuple[str, StatusReport]]:
        """The processes to show, by name, and what each of them does or waits for."""
        paths = list[Path]()
        with suppress(OSError):  # a shared disk refuses now and then: the next look sees them
            paths = sorted((self.run_dir / "status").glob("*.json"))
        for path in paths:
            report = None if path.stem == SUPERVISOR else read_status(path)
            if report is not None:
                yield path.stem, report

    def print(self, line: str) -> None:
        """Show a line of text: a restart, a wait, a stop."""
        print(printable(line), flush=True)

    def dry_run(self, config: Any, hooks: Any, quick: bool) -> Sequence[str]:
        """Lines about a run that ``--dry-run`` has checked. ``config``: the resolved config
        (``docs/config.md``). ``hooks``: the loaded plugins. ``quick``: without its environments.
        Raises ``ConfigError``. The base class has none."""
        return ()

    def ended(self) -> None:
        """All steps are trained. Called after ``__exit__``."""
        self.print(f"done: {self.run_dir}")

    def stopped(self, step: int | None, saved: bool, command: str) -> None:
        """The user has stopped the run after ``step``; None: at once. Called after ``__exit__``.

        ``saved``: this attempt has trained, and its weights are in ``<run>/weights``.
        ``command``: the command line of the run, which ``--resume`` continues.
        """
        self.print(f"stopped: {self.run_dir}")
