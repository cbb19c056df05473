"""Launchers: places for the processes of a run, and the processes themselves; and engines, the
inference servers among them. Orchestrator side: entry-point group ``prime_rl``.

    tasks -> place: where each will be -> (core now knows every address) -> start -> end, close

All places come first, because every process gets the addresses of the others.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal, TypeAlias

from prime_rl.errors import ConfigError
from prime_rl.plugins.base import Offer

MOST_READ = 1 << 16
"""Bytes at the end of a log that ``Process.last_lines`` reads."""

Part: TypeAlias = Literal["model", "inference", "trainer", "orchestrator"]
"""What a process is for."""


@dataclass(frozen=True)
class Task:
    """A process of the run that needs a place."""

    name: str
    """Also of its log and its status: ``trainer``; ``trainer_1`` on the second node."""
    part: Part
    number: int = 0
    """Its index in its part: the node of the trainer, the replica of the engine."""
    num_cpus: int = 1
    """CPU cores it uses."""
    num_gpus: int = 0
    gpus: tuple[int, ...] | None = None
    """Its GPU numbers, if the config names them (on one machine only)."""
    num_ports: int = 0
    """Ports it listens on."""
    apart: bool = False
    """No two tasks with this mark and of the same part share a node."""


@dataclass(frozen=True)
class Place:
    """Where a task will be."""

    address: str | None
    """The IP address it binds and the others connect to. None: this machine, at the addresses of
    the config."""
    ports: tuple[int, ...] = ()
    """``Task.num_ports`` free ports."""


@dataclass(frozen=True)
class ProcessCommand:
    """How to start one process, in the folder in which the run was started."""

    argv: Sequence[str]
    log: Path
    """Gets its stdout and stderr, appended. In the run directory."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to the variables that it inherits. Carries secrets."""
    needs: Sequence[Path] = ()
    """Files it must find where it runs. A remote launcher refuses a machine without them."""
    inherits: Sequence[str] | None = ()
    """Variables that it inherits from the launcher's processes beside those without a key
    (``prime_rl.variables.inherited``). None: all."""


class Process(ABC):
    """One running process."""

    name: str
    log: Path | None
    """None: it writes to our own stderr."""

    @property
    @abstractmethod
    def exit_code(self) -> int | None:
        """None while it runs; -N if signal N ended it. Read several times per second: must not
        wait."""

    def last_lines(self, count: int = 15) -> list[str]:
        """The end of its log."""
        if self.log is None:
            return []
        try:
            with self.log.open("rb") as file:  # a log may be long
                start = max(0, file.seek(0, os.SEEK_END) - MOST_READ)
                file.seek(start)
                end = file.read()
        except OSError:  # it has written nothing, or the disk refuses to say
            return []
        return end.decode(errors="replace").splitlines()[-count:]


class Launcher(Offer):
    """Finds places for the processes of a run and starts them there. Every place must see the run
    directory."""

    is_remote: ClassVar[bool] = True
    """Its places may be on other machines than this one."""

    def num_gpus(self) -> int:
        """GPUs it can assign in total; 0 if it assigns none."""
        return 0

    def place(
        self, tasks: Sequence[Task], run_dir: Path, tell: Callable[[str], None]
    ) -> Mapping[str, Place]:
        """A place for each task, by its name. While it waits, ``tell`` shows the user the reason.
        It is called again with tasks that have ended and start again: their places may have
        changed.

        Raises ``RunError`` if there is none."""
        raise NotImplementedError

    def start(self, task: Task, command: ProcessCommand) -> Process:
        """Start a task at its place, or restart it: what is left of the old process is killed
        first. The process must not outlive this one, however this one ends. Raises ``RunError``."""
        raise NotImplementedError

    def end(self, processes: Sequence[Process]) -> None:
        """Terminate processes (SIGTERM), and after some seconds kill them with their children.
        Ended ones are skipped."""
        raise NotImplementedError

    def close(self) -> None:
        """Release every place. Called last, once, however the run ends; also if ``place``
        failed."""


@dataclass(frozen=True)
class EngineLaunch:
    """The server that an engine plugin has to start."""

    model_path: Path
    """The weights that the server loads: a Hugging Face folder, or an id of the hub."""
    served_model_name: str
    """What requests give as ``model``."""
    host: str
    """The address to bind, without a port and without brackets."""
    port: int
    max_model_len: int
    """Prompt and completion together, in tokens."""
    seed: int
    """The run's seed, for all that the server draws. Requests have seeds of their own."""
    admin_key: str
    """Bearer key of the admin routes. Pass it by the environment: argument lists are public."""
    status_path: Path | None = None
    """The file ``status/NAME.json`` of the run directory, which the server writes while it starts,
    so that the user sees what the run waits for (``prime_rl.rundir.status.Status``). None: it
    writes no status."""
    weights_roots: Sequence[Path] | None = None
    """Folders, themselves or any parent, of all that ``/update_weights`` may name: the run
    directory (``broadcasts/step_N``) and the folders of the first weights. The server refuses
    others. None: anywhere."""
    policy_version: int = 0
    """The version of the weights in ``model_path``, which the server reports until the first
    update."""
    wait_for_model: bool = False
    """The folder is still being made: wait for the file ``.ready`` in it."""
    python: Path | None = None
    """Interpreter for the server, if ``Engine.check`` accepted one. None: ours."""
    can_sleep: bool = False
    """Engine and trainer share GPUs: ``/sleep`` has to free the memory."""
    records_routes: bool = False
    """The trainer replays the choices of routers: replies have ``routed_experts``."""


@dataclass(frozen=True)
class EngineCommand:
    """How to start one server process."""

    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)


class Engine(Offer):
    """An inference server behind the HTTP contract of ``docs/engines.md``."""

    lacks: ClassVar[Mapping[str, str]] = {}
    """Optional parts of that contract it does not have, and why: ``{"sleep": "no GPU"}``. The suite
    ``prime_rl_devkit.engines`` skips their checks with that reason."""
    receives: ClassVar[Sequence[str]] = ()
    """Weight transports by which its server can receive new weights. It is asked only where the
    run chooses the transport; ``GET /health`` decides."""

    def check(self, python: Path | None) -> None:
        """Refuse what the server would fail on, before any process starts.

        ``python`` is ``inference.python``; this default refuses one. Raises ``ConfigError``, or
        warns with ``ConfigWarning``.
        """
        if python is not None:
            raise ConfigError(
                f"inference.python: the engine {self.name!r} runs under the run's own interpreter; "
                "leave it out"
            )

    def command(self, launch: EngineLaunch) -> EngineCommand:
        """The process that serves ``launch.model_path`` on ``launch.port``, in the foreground.

        Also built for a dry run and before a start, only to see whether it raises ``ConfigError``
        for what the run asks of it, such as ``records_routes``.
        """
        raise NotImplementedError

    @property
    def num_gpus(self) -> int:
        """GPUs of one server where there are any: the size of its tensor parallelism."""
        return 1

    @property
    def capacity(self) -> int | None:
        """Requests that one server runs at once, as its settings say; more wait. None: they do not
        say. What a server answers in ``GET /health`` decides."""
        return None

    @property
    def dtype(self) -> str | None:
        """Precision of its weights, as torch spells it (``bfloat16``); None: not set. Rounded
        weights (``trainer.publish_dtype``) are refused for another one."""
        return None
