"""The launcher ``join``: engines and trainer nodes are started by hand, by Slurm or by Kubernetes,
and join the run.

    prime-rl run CONFIG.toml --launcher join --run.name RUN     model maker, orchestrator: here
    prime-rl join OUTPUTS/RUN inference                         on the engines' machines
    prime-rl join OUTPUTS/RUN trainer                           on the trainer's
"""

from __future__ import annotations

import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

from pydantic import PositiveFloat

from prime_rl.plugins.base import PluginConfig
from prime_rl.plugins.errors import ConfigError, RunError
from prime_rl.plugins.launchers import Launcher, Place, Process, ProcessCommand, Task
from prime_rl.run import meeting
from prime_rl.run.addresses import numeric
from prime_rl.run.children import Child, end, free_ports, start
from prime_rl.run.launch import ADMIN_KEY

HERE = ("model", "orchestrator")
"""Parts that run beside the supervisor."""
POLL_SECONDS = 0.1
END_SECONDS = 20.0
"""Within which a machine ends its process when told to."""


class JoinConfig(PluginConfig):
    """``[launcher] type = "join"``."""

    address: str = "127.0.0.1"
    """Where this machine listens and the others find it; ``auto``: its own address in the network
    it reaches others by."""
    timeout: PositiveFloat = 1800.0
    """Seconds to wait until every machine has joined."""


class Joined(Process):
    """A process on a machine that has joined."""

    def __init__(self, name: str, log: Path, path: Path, order: int) -> None:
        self.name = name
        self.log = log
        self.order = order
        self._path = path
        self._pulse = meeting.Pulse()
        self._lost = False

    @property
    def exit_code(self) -> int | None:
        """See ``Process.exit_code``; 1 too if its machine refused, or gives no sign of life."""
        agent = self.agent
        if agent is None or agent.refused:
            return 1
        if agent.order == self.order and agent.exit_code is not None:
            return agent.exit_code
        self._lost = self._pulse.still_for(agent.beat) > meeting.LOST_SECONDS
        return 1 if self._lost else None

    @property
    def agent(self) -> meeting.Agent | None:
        """What its machine last said."""
        return meeting.read(self._path, meeting.Agent)

    def last_lines(self, count: int = 15) -> list[str]:
        """The end of its log, and what is known of its machine."""
        lines = super().last_lines(count)
        agent = self.agent
        if agent is not None and agent.refused:
            lines.append(f"{agent.host}: {agent.refused}")
        elif agent is not None and self._lost:
            lines.append(f"{agent.host}: no sign of life for {meeting.LOST_SECONDS:.0f} s")
        return lines


class JoinLauncher(Launcher):
    """See the module."""

    name = "join"
    config_class = JoinConfig
    config: JoinConfig

    def __init__(self, config: PluginConfig) -> None:
        super().__init__(config)
        self._directory: Path | None = None
        self._orders: dict[str, meeting.Order] = {}
        self._closed = threading.Event()
        self._key = ""

    def place(
        self, tasks: Sequence[Task], run_dir: Path, tell: Callable[[str], None]
    ) -> Mapping[str, Place]:
        """See ``Launcher.place``: waits until a machine has joined for every engine and trainer
        node. Raises ``RunError`` if they do not come in time."""
        self._key = os.environ.get(ADMIN_KEY, "")
        if not self._key:
            raise ConfigError(
                f"launcher: machines join with the run's key, and {ADMIN_KEY} is not set. Set it "
                "to one secret here and wherever `prime-rl join` is started."
            )
        address = numeric(self.config.address)
        here = [task for task in tasks if task.part in HERE]
        others = [task for task in tasks if task.part not in HERE]
        places = {t.name: Place(address, tuple(free_ports(t.num_ports, address))) for t in here}
        self._open(meeting.places_dir(run_dir), others)
        return places | self._await(others, tell)

    def start(self, task: Task, command: ProcessCommand) -> Process:
        """See ``Launcher.start``. A machine that has joined works its command out by itself: its
        interpreter may lie elsewhere."""
        if task.part in HERE:
            return start(task.name, command.argv, command.env, command.log)
        number = self._orders.get(task.name, meeting.Order()).start + 1
        self._give(task.name, meeting.Order(number, needs=[str(path) for path in command.needs]))
        return Joined(task.name, command.log, self._path(f"{task.name}.agent"), number)

    def end(self, processes: Sequence[Process]) -> None:
        """See ``Launcher.end``."""
        joined = [each for each in processes if isinstance(each, Joined)]
        for each in joined:
            self._give(each.name, replace(self._orders[each.name], end=True))
        end([each for each in processes if isinstance(each, Child)])
        deadline = time.monotonic() + END_SECONDS
        while time.monotonic() < deadline and any(each.exit_code is None for each in joined):
            time.sleep(POLL_SECONDS)

    def close(self) -> None:
        """See ``Launcher.close``: the machines see that the run is over, and leave."""
        self._closed.set()
        if self._directory is not None:
            (self._directory.parent / meeting.OPEN).unlink(missing_ok=True)

    def _open(self, places: Path, tasks: Sequence[Task]) -> None:
        """Let machines join, and go on saying that somebody is here."""
        shutil.rmtree(places, ignore_errors=True)
        opened = meeting.Open(secrets.token_hex(8), [asdict(task) for task in tasks])
        self._directory = places / opened.meeting
        self._directory.mkdir(parents=True)
        meeting.write(places / meeting.OPEN, opened)
        threading.Thread(target=self._beat, args=(places, opened), daemon=True).start()

    def _beat(self, places: Path, opened: meeting.Open) -> None:
        number = 0
        while not self._closed.wait(meeting.BEAT_SECONDS):
            number += 1
            with suppress(OSError):  # the next beat may be heard
                meeting.write(places / meeting.OPEN, replace(opened, beat=number))
        (places / meeting.OPEN).unlink(missing_ok=True)  # should we have been writing it just then

    def _await(self, tasks: Sequence[Task], tell: Callable[[str], None]) -> dict[str, Place]:
        deadline = time.monotonic() + self.config.timeout
        places: dict[str, Place] = {}
        told, run_dir = "", self._path("").parent.parent
        while missing := [task.name for task in tasks if task.name not in places]:
            if (names := ", ".join(missing)) != told:
                told = names
                tell(f"machines to join as {names}: prime-rl join {run_dir} PART")
            if time.monotonic() > deadline:
                raise RunError(
                    f"nobody has joined as {names} within {self.config.timeout:.0f} s "
                    f"(launcher.timeout). Start `prime-rl join {run_dir} PART` on their machines."
                )
            time.sleep(POLL_SECONDS)
            for name in missing:
                if agent := meeting.read(self._path(f"{name}.agent"), meeting.Agent):
                    places[name] = self._admit(name, agent)
        return places

    def _admit(self, name: str, agent: meeting.Agent) -> Place:
        if agent.proof != meeting.proof(self._key, self._path("").name):
            raise RunError(
                f"{agent.host} joined as {name} with another key: {ADMIN_KEY} must be the same "
                "everywhere"
            )
        return Place(agent.address, tuple(agent.ports))

    def _give(self, name: str, order: meeting.Order) -> None:
        self._orders[name] = order
        meeting.write(self._path(f"{name}.order"), order)

    def _path(self, name: str) -> Path:
        assert self._directory is not None, "place comes first"
        return self._directory / name
