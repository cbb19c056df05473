"""The command line and the environment of each process of a run."""

from __future__ import annotations

import os
import re
import secrets
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from prime_rl import Engine, EngineLaunch
from prime_rl.config.run import RunConfig
from prime_rl.entries import DISABLE, disabled
from prime_rl.errors import ConfigError
from prime_rl.plugins.launchers import ProcessCommand, Task
from prime_rl.proxies import LOCAL, settle
from prime_rl.rundir.attempts import ORCHESTRATOR, PROCESS, newest_attempt
from prime_rl.rundir.directory import log_dir
from prime_rl.rundir.launch import ADMIN_KEY, ENGINE_KEY, NODE_ADDRESS, Launch
from prime_rl.rundir.logs import JSON_LOGS
from prime_rl.rundir.status import process_name
from prime_rl.variables import SECRET
from prime_rl_app.forks import ALLOCATOR

PYTHON = [sys.executable, "-P", "-m"]
"""``-P``: no file in the working directory replaces a module of Python's or a plugin."""
MODEL = "prime_rl_app.models"
TRAINER = "prime_rl.trainer"
"""The modules that these processes run."""
EXPANDABLE = {ALLOCATOR[0]: "expandable_segments:True"}
"""Rows of varied length otherwise leave pieces of memory that no later row fits into. Only for
trainers: vLLM has its own way to manage the memory that it gives back when it sleeps."""
AGENT = "prime_rl_app.agent"
"""The module of the process that starts the trainer's ranks of one node."""


@dataclass(frozen=True)
class RunKeys:
    """The run's secrets. They are passed by the environment because argument lists are public."""

    admin: str
    engine: str
    """Key of the sampling routes; empty: they need none."""

    @classmethod
    def of_run(cls, config: RunConfig, is_remote: bool) -> RunKeys:
        """Keys from the environment, else new ones. Remote launchers protect sampling too."""
        admin_key = os.environ.get(config.inference.admin_key_var)
        if config.inference.base_url:
            return cls(admin_key or "", os.environ.get(ENGINE_KEY, ""))
        new = secrets.token_urlsafe(24) if is_remote else ""
        return cls(admin_key or secrets.token_urlsafe(24), os.environ.get(ENGINE_KEY) or new)

    @property
    def env(self) -> dict[str, str]:
        """The environment variables that carry the keys."""
        return {ADMIN_KEY: self.admin} | ({ENGINE_KEY: self.engine} if self.engine else {})


@dataclass(frozen=True, kw_only=True)
class Commands:
    """How to start the processes of one launch."""

    config: RunConfig
    launch: Launch
    run_dir: Path
    engine: Engine
    keys: RunKeys

    def of(self, task: Task) -> ProcessCommand:
        """The command of one task."""
        log = log_dir(self.run_dir) / f"{task.name}.log"
        module = PYTHON
        attempt = newest_attempt(self.run_dir)
        # The model is, or will be, a local folder.
        env = {"HF_HUB_OFFLINE": "1", PROCESS: f"{attempt}:{task.name}:{self.run_dir.resolve()}"}
        needs = [self.run_dir / "configs" / "launch.json"]
        env |= variables_of(self.config, task.part)
        if self.config.log.json_logging:
            env[JSON_LOGS] = "1"
        without = disabled() | {*self.config.plugins.disabled}
        if without:
            env[DISABLE] = ",".join(sorted(without))
        if task.part == "model":  # the only process that may access the hub
            variables = {name: value for name, value in env.items() if name != "HF_HUB_OFFLINE"}
            return ProcessCommand(
                [*module, MODEL, str(self.run_dir)],
                log=log,
                env=variables,
                needs=needs,
                inherits=None,
            )

        model = Path(self.launch.model_path)
        initial = self.launch.initial
        # A machine must see the model's folder, or its parent until the folder exists.
        needs.append(model.parent if self.launch.wait_for_model else model)
        if initial != model:
            needs.append(initial if initial.exists() else initial.parent)
        # For engines elsewhere the user's own proxy settings apply.
        ours = [*self.launch.engine_urls, *self.launch.reference_urls.values()]
        engines = [] if self.config.inference.base_url else ours
        env |= self.keys.env | unproxied(engines, self.config.inference.base_url or ())
        if task.part == "inference":
            command = self.engine.command(
                engine_launch(
                    self.config,
                    self.launch,
                    run_dir=self.run_dir,
                    admin_key=self.keys.admin,
                    number=task.number,
                )
            )
            return ProcessCommand(
                command.argv,
                log=log,
                env=env | dict(command.env),
                needs=needs,
                inherits=self.config.deployment.pass_env,
            )

        if task.part == "trainer":
            env[NODE_ADDRESS] = self.launch.trainer_addresses[task.number]
            # The user's own settings replace ours, also on a machine that does not inherit them.
            users = {name: os.environ[name] for name in ALLOCATOR if name in os.environ}
            env |= {} if env.keys() & {*ALLOCATOR} else users or EXPANDABLE
            return ProcessCommand(
                trainer_command(self.launch, self.run_dir),
                log=log,
                env=env,
                needs=needs,
                inherits=self.config.deployment.pass_env,
            )

        # `kill_left` finds it by this path: it hides its environment.
        command_line = [*module, ORCHESTRATOR, str(self.run_dir.resolve())]
        return ProcessCommand(command_line, log=log, env=env, needs=needs, inherits=None)


OWN = re.compile(
    r"PRIME_RL_\w+|CUDA_VISIBLE_DEVICES|HF_HUB_OFFLINE|NO_PROXY|no_proxy|(LOCAL_)?(RANK|WORLD_SIZE)|"
    r"MASTER_(ADDR|PORT)"
)
"""Variables that the run itself sets."""


def variables_of(config: RunConfig, part: str) -> dict[str, str]:
    """What ``env_vars`` of the config has for a process of a ``part`` of the run, such as
    ``trainer``."""
    table = getattr(config, part, None)
    return {**config.env_vars, **getattr(table, "env_vars", {})}


def check_variables(config: RunConfig) -> None:
    """``env_vars`` has no key, which the run directory would show, and nothing that the run sets.
    Raises ``ConfigError``."""
    tables = {
        "env_vars": config.env_vars,
        "trainer.env_vars": config.trainer.env_vars,
        "orchestrator.env_vars": config.orchestrator.env_vars,
        "inference.env_vars": config.inference.env_vars,
    }
    for where, variables in tables.items():
        for name in variables:
            if SECRET.fullmatch(name):
                raise ConfigError(
                    f"{where}.{name}: by its name it is a secret, and the config is written to the "
                    "run directory. Export it in the shell that starts the run, and name it in "
                    "deployment.pass_env (engines, trainer) or orchestrator.workers.pass_env "
                    "(environment workers); the orchestrator gets it anyway."
                )
            if OWN.fullmatch(name):
                raise ConfigError(
                    f"{where}.{name}: the run sets this variable itself. Leave it out; GPUs are "
                    "chosen by deployment.trainer_gpus and deployment.inference_gpus."
                )


def trainer_command(launch: Launch, run_dir: Path) -> list[str]:
    """The argument list of one trainer node, the same on all nodes."""
    if launch.num_ranks == 1:
        return [*PYTHON, TRAINER, str(run_dir)]
    command = [*PYTHON, AGENT, str(run_dir), "--ranks", str(launch.num_ranks)]
    if launch.trainer_nodes > 1:
        command += ["--nodes", str(launch.trainer_nodes), "--endpoint", launch.rendezvous]
        command += ["--id", run_dir.name]
    return command


def unproxied(engine_urls: Sequence[str], elsewhere: Sequence[str] = ()) -> dict[str, str]:
    """``NO_PROXY`` with the run's engines and this machine: a site's proxy cannot reach them and
    must not see their keys. Of the engines ``elsewhere`` it has those in a range that the user
    excepts."""
    environ = {**os.environ}
    settle(environ, elsewhere)
    exceptions = environ.get("no_proxy") or environ.get("NO_PROXY") or ""
    hosts = [*exceptions.split(","), *LOCAL, *(urlsplit(url).hostname or "" for url in engine_urls)]
    value = ",".join(dict.fromkeys(host.strip() for host in hosts if host.strip()))
    return {"NO_PROXY": value, "no_proxy": value}


def engine_launch(
    config: RunConfig, launch: Launch, run_dir: Path, admin_key: str, number: int = 0
) -> EngineLaunch:
    """An engine of the policy, or one after them, which starts with its first weights."""
    name = process_name("inference", number)
    initial = launch.initial
    lives = name in launch.engine_names
    if lives:
        url = launch.engine_urls[launch.engine_names.index(name)]
    else:
        url = [*launch.reference_urls.values()][number - config.inference.replicas]

    host, _, port = url.removeprefix("http://").rpartition(":")
    return EngineLaunch(
        model_path=Path(launch.model_path) if lives else initial,
        wait_for_model=launch.wait_for_model if lives else not initial.exists(),
        served_model_name=launch.served_model_name,
        host=host.strip("[]"),
        port=int(port),
        max_model_len=config.inference.max_model_len or config.seq_len,
        seed=config.seed,
        admin_key=admin_key,
        status_path=run_dir / "status" / f"{name}.json",
        weights_roots=(run_dir, initial, launch.first_weights),
        policy_version=launch.engine_version if lives else 0,
        python=config.inference.interpreter,
        can_sleep=config.deployment.colocated,
        records_routes=lives and config.trainer.router_replay,
    )


def check_command(config: RunConfig, engine: Engine) -> None:
    """The engine can do what the run asks of it (``EngineLaunch``). This builds the command of the
    policy's first engine and starts nothing: address, key and folder are examples. Raises
    ``ConfigError``."""
    launch = Launch(
        model_path=config.model.name,
        wait_for_model=True,  # nothing of it may be read
        served_model_name=config.model.name,
        engine_urls=["http://127.0.0.1:1"],
        engine_names=[process_name("inference", 0)],
        transport_type=config.rollout_transport.type,
        transport_host="127.0.0.1",
        transport_ports=[],
    )
    engine.command(engine_launch(config, launch, Path(config.output_dir), admin_key="none"))
