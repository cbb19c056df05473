"""What a run shows never decides over it.

The reader of stdout may go away (``| head``), its disk may be full, its terminal may close, and a
view is a plugin that may fail. The run goes on: lines that cannot be shown go to ``view.log``
beside the logs of the processes.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from prime_rl.errors import PrimeRLError, printable
from prime_rl.plugins.view import RunView
from prime_rl.rundir.directory import log_dir
from prime_rl.rundir.status import read_rows

VIEW_LOG = "view.log"


def counted(number: int, noun: str) -> str:
    """``1 key``, ``1,200 keys``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def as_reward(value: float) -> str:
    """``0.375``; with an exponent where three places would read as 0 or fill the line."""
    is_plain = value == 0 or 0.0005 <= abs(value) < 1e6
    return f"{value:.3f}" if is_plain else f"{value:.3g}"


def say(text: str, stream: TextIO | None) -> None:
    """Print a line for the user; nothing where it cannot be written."""
    if stream is None:  # the shell has closed it: >&-
        return
    try:
        print(printable(text), file=stream, flush=True)
    except (OSError, ValueError):
        mute(stream)


def mute(stream: TextIO | None) -> None:
    """Let a broken stream write to nowhere. Else Python fails when it flushes the stream at exit,
    and ends with code 120."""
    with suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())  # type: ignore[union-attr]
        os.close(nowhere)


class SafeView(RunView):
    """A view whose failures stay with it. After the first one the base class shows the run,
    messages go to ``view.log`` too, and the view still writes its summary."""

    def __init__(self, view: RunView) -> None:
        super().__init__(view.config, view.run_dir, view.max_steps)
        self._view = view
        self._plain = RunView(view.config, view.run_dir, view.max_steps)
        self._has_failed = self._is_open = False

    def __enter__(self) -> SafeView:
        try:
            self._view.__enter__()
            self._is_open = True
        except PrimeRLError:
            raise  # what the user asked for cannot be, and nothing has started yet
        except (Exception, SystemExit) as error:
            self._note_failure(error)
        return self

    def __exit__(self, *exc: object) -> None:
        if self._is_open:
            self._is_open = False
            self._try(self._view.__exit__, *exc)

    def refresh(self) -> None:
        if not self._has_failed:
            self._try(self._view.refresh)
            return
        with suppress(OSError, ValueError):
            self._plain.refresh()

    def print(self, line: str) -> None:
        if self._has_failed or not self._try(self._view.print, line):
            self._log(line)
            say(line, sys.stdout)

    def ended(self) -> None:
        self._try(self._view.ended)

    def stopped(self, step: int | None, saved: bool, command: str) -> None:
        self._try(self._view.stopped, step, saved, command)

    def _try(self, call: Callable[..., Any], *arguments: Any) -> bool:
        """Whether the call has succeeded. A second Ctrl-C passes."""
        try:
            call(*arguments)
            return True
        except (Exception, SystemExit) as error:  # rich exits where stdout's reader is gone
            self._note_failure(error)
            return False

    def _note_failure(self, error: BaseException) -> None:
        if isinstance(error, OSError | SystemExit):
            mute(sys.stdout)
        self._log("".join(traceback.format_exception(error)).rstrip())
        if self._has_failed:
            return
        self._has_failed = True
        reason = "nothing reads stdout" if isinstance(error, SystemExit) else f"{error!r}"
        where = log_dir(self.run_dir) / VIEW_LOG
        say(f"the view has failed ({reason}). The run goes on; see {where}", sys.stderr)
        self.__exit__(None, None, None)  # its screen must not hide what is printed now

    def _log(self, text: str) -> None:
        with (
            suppress(OSError),
            (log_dir(self.run_dir) / VIEW_LOG).open("a", encoding="utf-8") as file,
        ):
            file.write(f"{printable(text)}\n")


class CallingView(RunView):
    """A view that also calls functions of the user with each step after it. An exception of theirs
    ends the run: it is the user's own code."""

    def __init__(
        self, view: RunView, on_step: Sequence[Callable[[int], object]], last_step: int
    ) -> None:
        """``last_step``: the step of the checkpoint that the run continues, 0 without one."""
        super().__init__(view.config, view.run_dir, view.max_steps)
        self._view = view
        self._on_step = on_step
        self._last_step = last_step

    def __enter__(self) -> CallingView:
        self._view.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self._view.__exit__(*exc)

    def refresh(self) -> None:
        self._view.refresh()
        for step in trained_steps(self.run_dir):
            if step <= self._last_step:
                continue
            self._last_step = step
            for call in self._on_step:
                call(step)

    def print(self, line: str) -> None:
        self._view.print(line)

    def ended(self) -> None:
        self._view.ended()

    def stopped(self, step: int | None, saved: bool, command: str) -> None:
        self._view.stopped(step, saved, command)


def trained_steps(run_dir: Path) -> list[int]:
    """The steps whose metrics are complete: of the batch and of the trainer."""
    rows = read_rows(run_dir / "metrics.jsonl")
    return sorted({row["step"] for row in rows if any(name.startswith(TRAINED) for name in row)})


TRAINED = "optim/"
"""Prefix of the metrics of a step that the trainer has taken."""
