"""What every piece of one run's orchestrator shares."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from prime_rl.config.run import RunConfig
from prime_rl.env.environment import Environment
from prime_rl.inference.fleet import Fleet
from prime_rl.monitor.waiting import Stopwatch
from prime_rl.orchestrator.host import EnvHost, Outages
from prime_rl.orchestrator.policy import Policy
from prime_rl.orchestrator.sources import RolloutSource
from prime_rl.plugins.algorithm import Algorithm
from prime_rl.plugins.manager import Hooks
from prime_rl.rundir.launch import Launch
from prime_rl.rundir.status import Status


@dataclass(frozen=True, eq=False)
class RunContext:
    """One attempt at one run."""

    config: RunConfig
    launch: Launch
    run_dir: Path
    hooks: Hooks
    status: Status
    waited: Stopwatch = field(default_factory=Stopwatch)
    """Seconds per step by ``wait/...`` and ``time/...``."""


@dataclass(frozen=True, eq=False)
class Engines:
    """The engines that sample from the policy, and which version they serve."""

    fleet: Fleet
    policy: Policy
    outages: Outages
    """Endpoints that a request waits for."""


@dataclass(frozen=True, eq=False)
class TrainEnv:
    """One training environment: where rollouts come from, and who credits them."""

    name: str
    environment: Environment
    source: RolloutSource
    algorithm: Algorithm
    hooks: Hooks
    """This env's scope: every installed plugin and its own algorithm."""
    host: EnvHost
    group_size: int
    """Asks a group: 1 where one ask brings the whole group."""
