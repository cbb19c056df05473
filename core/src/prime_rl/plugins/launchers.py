"""What a launcher offers: places for the processes of a run, and the processes themselves.

    tasks -> place: where each will be -> (core now knows every address) -> start -> end, close

A place comes before its process because every process is told the addresses of the others.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal, TypeAlias

from prime_rl.plugins.base import Offer

Part: TypeAlias = Literal["model", "inference", "trainer", "orchestrator"]
"""What a process is for."""


@dataclass(frozen=True)
class Task:
    """A process of the run that needs a place."""

    name: str
    """Of the process, its log and its status: ``trainer``; ``trainer_1`` on the second node."""
    part: Part
    number: int = 0
    """Among the tasks of its part: the node of the trainer, the replica of the engine."""
    num_cpus: int = 1
    """Cores it keeps busy."""
    num_gpus: int = 0
    gpus: tuple[int, ...] | None = None
    """Numbers of its GPUs where the config names them, which it does on one machine only."""
    num_ports: int = 0
    """Ports it listens on."""
    apart: bool = False
    """Not on a node that has another task of its part."""


@dataclass(frozen=True)
class Place:
    """Where a task will be."""

    address: str | None
    """At which the others reach what listens there, and which it binds: a number, no name. None:
    this machine, at the addresses of the config."""
    ports: tuple[int, ...] = ()
    """``Task.num_ports`` of them that nobody listens on there."""


@dataclass(frozen=True)
class ProcessCommand:
    """How to start one process."""

    argv: Sequence[str]
    log: Path
    """Takes its output and its errors, appended. In the run directory."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Beyond what the launcher's processes have anyway. Secrets come this way."""
    needs: Sequence[Path] = ()
    """Files that it must find where it runs. A launcher that starts on other machines refuses a
    machine that does not see them."""


class Process(ABC):
    """One running process."""

    name: str
    log: Path | None
    """None: it writes to our own stderr."""

    @property
    @abstractmethod
    def exit_code(self) -> int | None:
        """None while it runs; -N if signal N ended it. Asked several times a second: does not
        wait."""

    def last_lines(self, count: int = 15) -> list[str]:
        """The end of its log."""
        if self.log is None or not self.log.exists():
            return []
        return self.log.read_text(errors="replace").splitlines()[-count:]


class Launcher(Offer):
    """Finds places for the processes of a run and starts them there.

    The run directory must be on a disk that every place sees.
    """

    is_remote: ClassVar[bool] = True
    """Its places may be on other machines than this one."""

    def num_gpus(self) -> int:
        """How many GPUs it can give away in all; 0 also if it does not hand out GPUs."""
        return 0

    def place(
        self, tasks: Sequence[Task], run_dir: Path, tell: Callable[[str], None]
    ) -> Mapping[str, Place]:
        """A place for each task, by its name. It may wait; ``tell`` shows the user for what.

        Raises ``RunError`` if there is none."""
        raise NotImplementedError

    def start(self, task: Task, command: ProcessCommand) -> Process:
        """Start a task at its place; again, if it has ended or hangs: what is left of it is made to
        end first.

        The process must not outlive this one, however this one ends. Raises ``RunError``."""
        raise NotImplementedError

    def end(self, processes: Sequence[Process]) -> None:
        """Ask processes to end (SIGTERM), and make those that have not after some seconds, with
        whatever they started. Those that have ended are no mistake."""
        raise NotImplementedError

    def close(self) -> None:
        """Give every place back. Called last, once, however the run ends; also if ``place``
        failed."""
