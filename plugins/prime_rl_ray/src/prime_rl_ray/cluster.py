"""The driver's side: placement groups, agents, and the processes that they run."""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayActorError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from prime_rl import Place, Process, ProcessCommand, RunError, Task
from prime_rl.variables import inherited
from prime_rl_ray.agent import Agent

if TYPE_CHECKING:
    from prime_rl_env_workers.placed import EnvServer
    from prime_rl_ray import RayConfig

FORWARDED = ("PRIME_RL_", "HF_", "WANDB_", "VLLM_", "NCCL_", "GLOO_", "TORCH_")
POLL_SECONDS = 0.25
CONNECT_SECONDS = 10.0
END_SECONDS = 20.0
"""Time for a node to end its process."""
FILE_SECONDS = 60.0
"""Time for a file to reach a node through a shared disk's cache."""
START_SECONDS = 120.0
"""Time for an agent to start once it is placed, unless ``launcher.timeout`` is longer."""


class RayProcess(Process):
    """A process on a node of the cluster."""

    def __init__(self, name: str, log: Path, agent: Any, running: ray.ObjectRef[Any]) -> None:
        self.name = name
        self.log = log
        self.agent = agent
        self._running = running
        self._code: int | None = None
        self._why = ""
        self.is_lost = False
        """Whether its actor is gone, so that it cannot start another process."""

    @property
    def exit_code(self) -> int | None:
        """See ``Process.exit_code``. Also 1 if its node refused it, and -9 if its actor died."""
        if self._code is None and ray.wait([self._running], timeout=0)[0]:
            self._code = self._result()
        return self._code

    def _result(self) -> int:
        try:
            result = ray.get(self._running)
        except RayActorError as error:
            self.is_lost = True
            self._why = f"its Ray actor is gone: {_first_line(error)}"
            return -signal.SIGKILL
        except RayError as error:
            self._why = f"its Ray actor failed: {_first_line(error)}"
            return 1

        if isinstance(result, str):
            self._why = result
            return 1

        return int(result)

    def last_lines(self, count: int = 15) -> list[str]:
        """The end of its log, and the reason from Ray."""
        return super().last_lines(count) + ([self._why] if self._why else [])


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "no reason")


def _check_address(address: str) -> None:
    """Raises ``OSError`` if nothing listens there. Ray itself would try for a minute."""
    host, colon, port = address.rpartition(":")
    if colon and host and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()


class Cluster:
    """A connection to a Ray cluster, for one run. Raises ``RunError`` if there is none."""

    def __init__(self, config: RayConfig) -> None:
        self._config = config
        self._groups: list[PlacementGroup] = []
        self._agents: dict[str, Any] = {}
        self._rooms: dict[str, tuple[PlacementGroup, int]] = {}
        self._started: dict[str, RayProcess] = {}
        self._kept: dict[str, ray.ObjectRef[Any]] = {}
        where = config.address or os.environ.get("RAY_ADDRESS") or "auto"
        handler = signal.getsignal(signal.SIGTERM)
        try:
            _check_address(where)
            ray.init(address=where, log_to_driver=False, logging_level=logging.ERROR)
        except (OSError, ValueError, RayError, RuntimeError) as error:
            raise RunError(
                f"no Ray cluster at {where}: {_first_line(error)}. Start one (ray start --head), "
                "or set launcher.address."
            ) from error
        finally:
            signal.signal(signal.SIGTERM, handler)  # Ray installs its own

    def num_gpus(self) -> int:
        """GPUs of the whole cluster."""
        return int(ray.cluster_resources().get("GPU", 0))

    def spare_cpus(self, tasks: Sequence[Task]) -> list[int]:
        """By node, how many CPUs workers of environments may take: half of its own, and an equal
        part of what is free in the cluster beside the tasks. The largest first."""
        nodes = [int(n["Resources"].get("CPU", 0)) for n in ray.nodes() if n["Alive"]]
        free = int(ray.available_resources().get("CPU", 0)) - sum(t.num_cpus for t in tasks)
        return sorted((max(0, min(n // 2, free // len(nodes))) for n in nodes), reverse=True)

    def place(
        self,
        tasks: Sequence[Task],
        tell: Callable[[str], None],
        servers: Sequence[EnvServer] = (),
    ) -> dict[str, Place]:
        """Reserve room for every task and server and start an agent there. A task that has room
        gets a new agent in it: Ray may have moved it from a lost node to another one."""
        tasks = [*tasks, *map(KeptTask.of, servers)]
        for task in tasks:
            if task.name in self._rooms:
                with suppress(RayError):
                    self._kill(task.name)
                self._started.pop(task.name, None)
                self._agents[task.name] = _agent(*self._rooms[task.name], task)

        apart = [task for task in tasks if task.apart and task.name not in self._rooms]
        others = [task for task in tasks if not task.apart and task.name not in self._rooms]
        rooms: list[tuple[PlacementGroup, list[Task]]] = []
        for group, strategy in ((apart, "STRICT_SPREAD"), (others, self._config.strategy)):
            if group:
                room = placement_group([_bundle(task) for task in group], strategy=strategy)
                self._groups.append(room)
                rooms.append((room, group))

        for room, group in rooms:
            self._await_room(room, group, tell)
        for room, group in rooms:
            for index, task in enumerate(group):
                self._rooms[task.name] = (room, index)
                self._agents[task.name] = _agent(room, index, task)

        return self._places(tasks)

    def _await_room(
        self, room: PlacementGroup, tasks: Sequence[Task], tell: Callable[[str], None]
    ) -> None:
        ready = room.ready()
        names = ", ".join(task.name for task in tasks)
        tell(f"Ray cluster (room for {names})")
        deadline = time.monotonic() + self._config.timeout
        while not ray.wait([ready], timeout=POLL_SECONDS)[0]:
            if time.monotonic() > deadline:
                raise RunError(_no_room(tasks, self._config.timeout))

    def _places(self, tasks: Sequence[Task]) -> dict[str, Place]:
        """Where the agents are. An agent that dies is started again: Ray takes seconds to notice
        that a node is lost, and to move the placement group."""
        deadline = time.monotonic() + max(START_SECONDS, self._config.timeout)
        places = dict[str, Place]()
        while left := [task for task in tasks if task.name not in places]:
            asked = [self._agents[task.name].place.remote(task.num_ports) for task in left]
            for task, answer in zip(left, asked, strict=True):
                try:
                    address, ports = ray.get(answer, timeout=max(0.0, deadline - time.monotonic()))
                    places[task.name] = Place(address, tuple(ports))
                except RayError as error:
                    if not isinstance(error, RayActorError) or time.monotonic() > deadline:
                        raise RunError(
                            f"an agent could not be started on the Ray cluster: "
                            f"{_first_line(error)}. Every node needs this Python environment: "
                            "prime-rl-ray and prime-rl-core."
                        ) from error
                    time.sleep(POLL_SECONDS)
                    self._agents[task.name] = _agent(*self._rooms[task.name], task)

        return places

    def start(self, task: Task, command: ProcessCommand) -> Process:
        """Start the task's process through its agent. If the agent died with the previous process,
        start a new agent in the same place."""
        before = self._started.get(task.name)
        if before is not None and before.is_lost:
            self._agents[task.name] = _agent(*self._rooms[task.name], task)
        agent = self._agents[task.name]
        needs = [str(path) for path in command.needs]
        env = self._forwarded(command.inherits) | dict(command.env)
        running = agent.run.remote(
            task.name,
            list(command.argv),
            env,
            str(command.log),
            os.getcwd(),
            needs,
            FILE_SECONDS,
            None if command.inherits is None else list(command.inherits),
        )
        self._started[task.name] = RayProcess(task.name, command.log, agent=agent, running=running)
        return self._started[task.name]

    def keep(self, server: EnvServer, command: ProcessCommand) -> None:
        """Have the server's agent keep its process. ``command``: the orchestrator's."""
        env = server.environment(self._forwarded(None) | dict(command.env))
        argv = list(server.argv)
        log = command.log.with_name(f"{server.name}.log")
        needs = [str(path) for path in command.needs]
        self._kept[server.name] = self._agents[server.name].keep.remote(
            server.name, argv, env, str(log), os.getcwd(), needs, FILE_SECONDS, str(server.file)
        )

    def _forwarded(self, inherits: Sequence[str] | None) -> dict[str, str]:
        """Variables of our environment to pass on. ``inherits``: see ``ProcessCommand``."""
        wanted = self._config.forward_env
        return {
            name: value for name, value in inherited(inherits).items() if name.startswith(FORWARDED)
        } | {name: os.environ[name] for name in wanted if name in os.environ}

    def end(self, processes: Sequence[Process]) -> None:
        """See ``Launcher.end``."""
        alive = [each for each in processes if isinstance(each, RayProcess)]
        asked = [each.agent.end.remote() for each in alive]
        if asked:
            ray.wait(asked, num_returns=len(asked), timeout=END_SECONDS)

    def _kill(self, name: str) -> None:
        if name in self._kept:
            ray.cancel(self._kept.pop(name))  # else Ray prints that it will be retried
        ray.kill(self._agents[name])

    def close(self) -> None:
        """End the agents, release their room and disconnect."""
        with suppress(RayError, ConnectionError):
            for name in self._agents:
                self._kill(name)
            for room in self._groups:
                remove_placement_group(room)
        ray.shutdown()


class KeptTask(Task):
    """A server of an environment: Ray replaces an agent that dies, which starts it again."""

    @classmethod
    def of(cls, server: EnvServer) -> KeptTask:
        return cls(server.name, "orchestrator", num_cpus=server.num_workers)


def _bundle(task: Task) -> dict[str, float]:
    gpus = {"GPU": float(task.num_gpus)} if task.num_gpus else {}
    return {"CPU": float(task.num_cpus), **gpus}


def _agent(room: PlacementGroup, index: int, task: Task) -> Any:
    strategy = PlacementGroupSchedulingStrategy(
        placement_group=room, placement_group_bundle_index=index
    )
    times = -1 if isinstance(task, KeptTask) else 0  # -1: always
    actor = ray.remote(Agent).options(
        num_cpus=task.num_cpus,
        num_gpus=task.num_gpus,
        scheduling_strategy=strategy,
        max_restarts=times,
        max_task_retries=times,
    )
    return actor.remote()


def _no_room(tasks: Sequence[Task], seconds: float) -> str:
    wanted = {task.name: _bundle(task) for task in tasks}
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    has = [{name: each.get(name, 0.0) for name in ("CPU", "GPU")} for each in nodes]
    free = {name: ray.available_resources().get(name, 0.0) for name in ("CPU", "GPU")}
    apart = ", each on a separate node" if any(task.apart for task in tasks) else ""
    return (
        f"the Ray cluster had no room for {wanted}{apart} within {seconds:.0f} s "
        f"(launcher.timeout). Its nodes have {has}, of which {free} are free."
    )
