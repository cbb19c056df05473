"""The command line and the environment of each process of a run."""

from __future__ import annotations

import hmac
import os
import secrets
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from prime_rl.config.run import RunConfig
from prime_rl.plugins.base import Engine, EngineLaunch
from prime_rl.plugins.launchers import ProcessCommand, Task
from prime_rl.run.addresses import LOCAL
from prime_rl.run.directory import log_dir
from prime_rl.run.launch import ADMIN_KEY, ENGINE_KEY, NODE_ADDRESS, Launch
from prime_rl.run.trainer_command import trainer_command

MODEL, ORCHESTRATOR = "prime_rl.run.models", "prime_rl.orchestrator"
"""The modules that are these processes."""


@dataclass(frozen=True)
class Keys:
    """The run's secrets. They go by the environment: argument lists are public."""

    admin: str
    engine: str
    """Of the sampling routes; empty: they need none."""

    @classmethod
    def of_run(cls, config: RunConfig, is_remote: bool) -> Keys:
        """Those of the environment, else new ones. Beyond this machine sampling needs one too: who
        has the one, has both."""
        given = os.environ.get(config.inference.admin_key_var)
        if config.inference.base_url:
            return cls(given or "", os.environ.get(ENGINE_KEY, ""))
        admin = given or secrets.token_urlsafe(24)
        derived = hmac.new(admin.encode(), b"sampling", "sha256").hexdigest() if is_remote else ""
        return cls(admin, os.environ.get(ENGINE_KEY) or derived)

    @property
    def env(self) -> dict[str, str]:
        """The variables that carry them."""
        return {ADMIN_KEY: self.admin, **({ENGINE_KEY: self.engine} if self.engine else {})}


@dataclass(frozen=True)
class Commands:
    """How to start the processes of one launch."""

    config: RunConfig
    launch: Launch
    run_dir: Path
    engine: Engine
    keys: Keys

    def of(self, task: Task) -> ProcessCommand:
        """The command of one task."""
        log = log_dir(self.run_dir) / f"{task.name}.log"
        env = {"HF_HUB_OFFLINE": "1"}  # the model is, or will be, a folder here
        needs = [self.run_dir / "configs" / "launch.json"]
        if task.part == "model":  # the only one that may ask the hub
            return ProcessCommand(self._module(MODEL), log, {}, needs)
        needs.append(self._model_marker)
        env |= self.keys.env | unproxied(self._own_engines)
        if task.part == "inference":
            command = self.engine.command(
                engine_launch(self.config, self.launch, self.run_dir, self.keys.admin, task.number)
            )
            return ProcessCommand(command.argv, log, env | dict(command.env), needs)
        if task.part == "trainer":
            env[NODE_ADDRESS] = self.launch.trainer_addresses[task.number]
            return ProcessCommand(trainer_command(self.launch, self.run_dir), log, env, needs)
        return ProcessCommand(self._module(ORCHESTRATOR), log, env, needs)

    def _module(self, module: str) -> list[str]:
        return [sys.executable, "-m", module, str(self.run_dir)]

    @property
    def _own_engines(self) -> list[str]:
        """Not those elsewhere: whether a proxy leads there, the user's environment says."""
        return [] if self.config.inference.base_url else self.launch.engine_urls

    @property
    def _model_marker(self) -> Path:
        """What a machine must see to see the model: the folder, or the one it is being made in."""
        path = Path(self.launch.model_path)
        return path.parent if self.launch.wait_for_model else path


def unproxied(engine_urls: Sequence[str]) -> dict[str, str]:
    """``NO_PROXY`` with the run's engines and this machine: the site's proxy does not reach them,
    and has no business with their keys."""
    given = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    hosts = [*given.split(","), *LOCAL, *(urlsplit(url).hostname or "" for url in engine_urls)]
    value = ",".join(dict.fromkeys(host.strip() for host in hosts if host.strip()))
    return {"NO_PROXY": value, "no_proxy": value}


def engine_launch(
    config: RunConfig, launch: Launch, run_dir: Path, admin_key: str, number: int = 0
) -> EngineLaunch:
    """What one engine of a run is told."""
    host, _, port = launch.engine_urls[number].removeprefix("http://").rpartition(":")
    name = f"inference_{number}" if number else "inference"
    return EngineLaunch(
        model_path=Path(launch.model_path),
        wait_for_model=launch.wait_for_model,
        served_model_name=launch.served_model_name,
        host=host.strip("[]"),
        port=int(port),
        max_model_len=config.inference.max_model_len or config.seq_len,
        seed=config.seed,
        admin_key=admin_key,
        status_path=run_dir / "status" / f"{name}.json",
        policy_version=launch.engine_version,
        python=config.inference.interpreter,
        can_sleep=config.deployment.colocated,
    )
