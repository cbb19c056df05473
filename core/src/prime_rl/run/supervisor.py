"""``prime-rl run``: start every process of a run, show what they do, and end them all together.

    model maker (if the model is made here)
    inference engine      HTTP on a free loopback port; admin routes need the run's key
    trainer               receives micro batches, publishes weights
    orchestrator          everything in between; when it is done, the run is done

A child that dies ends the run with its name, exit code and last log lines; none is left behind.
"""

from __future__ import annotations

import os
import secrets
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from prime_rl.config.run import RunConfig
from prime_rl.plugins.base import EngineLaunch
from prime_rl.plugins.errors import RunError
from prime_rl.plugins.manager import load_plugins
from prime_rl.run.checkpoints import Checkpoint
from prime_rl.run.children import (
    Child,
    end,
    free_ports,
    sigterm_is_ctrl_c,
    start,
    uninterrupted,
)
from prime_rl.run.control import supervised
from prime_rl.run.directory import log_dir
from prime_rl.run.launch import ADMIN_KEY, Launch
from prime_rl.run.models import model_path
from prime_rl.run.resolve import build_engine
from prime_rl.run.status import DONE, read_status
from prime_rl.run.view import View

TICK_SECONDS = 0.25
ORCHESTRATOR = "prime_rl.orchestrator"
"""The module that is the orchestrator's process."""
TRAINER_GRACE = 1800.0
"""Seconds the trainer may take to write the final weights after the orchestrator is done."""


def run(config: RunConfig, run_dir: Path, view: View, checkpoint: Checkpoint | None = None) -> None:
    """Train, from a checkpoint if one is given. Raises ``RunError`` when a child dies,
    ``KeyboardInterrupt`` when the user stops it."""
    launch = _plan(config, checkpoint)
    launch.write(run_dir)
    key = os.environ.get(ADMIN_KEY) or secrets.token_urlsafe(24)
    children: list[Child] = []
    with supervised(run_dir), sigterm_is_ctrl_c():
        try:
            children += _start(config, launch, run_dir, key)
            _watch(children, view)
        finally:
            with uninterrupted():
                end(children)


def _plan(config: RunConfig, checkpoint: Checkpoint | None = None) -> Launch:
    """Ports, paths and names of this launch.

    A run that goes on takes its model from the checkpoint, with the tokenizer that came along.
    """
    path, to_make = model_path(config) if checkpoint is None else (str(checkpoint.weights), False)
    engine_port, wire_port = free_ports(2)
    engine_port = config.inference.port or engine_port
    return Launch(
        model_path=path,
        wait_for_model=to_make,
        served_model_name=config.model.name,
        engine_urls=[f"http://{config.inference.host}:{engine_port}"],
        transport_type=config.rollout_transport.type,
        transport_host=config.rollout_transport.host,
        transport_ports=[config.rollout_transport.port or wire_port],
        transport_hwm=config.rollout_transport.hwm,
        first_step=checkpoint.step + 1 if checkpoint else 1,
        resume_from=str(checkpoint.directory) if checkpoint else None,
    )


def _start(config: RunConfig, launch: Launch, run_dir: Path, key: str) -> Iterator[Child]:
    """Every process at once: they import and wait for one another, which is quicker than in
    turn."""
    env = {ADMIN_KEY: key, "HF_HUB_OFFLINE": "1"}  # the model is, or will be, a folder here
    logs = log_dir(run_dir)

    def module(name: str, module: str, env: dict[str, str] = env) -> Child:
        return start(name, [sys.executable, "-m", module, str(run_dir)], env, logs / f"{name}.log")

    if launch.wait_for_model:
        yield module("model", "prime_rl.run.models", {})  # the only one that may ask the hub
    engine = build_engine(config, load_plugins(disabled=config.plugins.disabled))
    command = engine.command(_engine_launch(config, launch, run_dir, key))
    yield start("inference", command.argv, env | dict(command.env), logs / "inference.log")
    yield module("trainer", "prime_rl.trainer")
    yield module("orchestrator", ORCHESTRATOR)


def _engine_launch(config: RunConfig, launch: Launch, run_dir: Path, key: str) -> EngineLaunch:
    return EngineLaunch(
        model_path=Path(launch.model_path),
        wait_for_model=launch.wait_for_model,
        served_model_name=launch.served_model_name,
        host=config.inference.host,
        port=int(launch.engine_urls[0].rsplit(":", 1)[1]),
        max_model_len=config.inference.max_model_len or config.seq_len,
        seed=config.seed,
        admin_key=key,
        status_path=run_dir / "status" / "inference.json",
        policy_version=launch.first_step - 1,
    )


def _watch(children: list[Child], view: View) -> None:
    """Until the orchestrator and the trainer are done. Raises ``RunError`` if anyone dies
    before."""
    by_name = {child.name: child for child in children}
    orchestrator, trainer = by_name["orchestrator"], by_name["trainer"]
    deadline: float | None = None
    while orchestrator.exit_code is None or trainer.exit_code is None:
        for child in children:
            _check_alive(child, view.run_dir)
        if orchestrator.exit_code == 0:
            deadline = deadline or time.monotonic() + TRAINER_GRACE
            if time.monotonic() > deadline:
                raise RunError(
                    f"the trainer is still busy {TRAINER_GRACE:.0f} s after the last step"
                )
        view.refresh()
        time.sleep(TICK_SECONDS)
    for child in (orchestrator, trainer):
        _check_alive(child, view.run_dir)
    view.refresh()


def _check_alive(child: Child, run_dir: Path) -> None:
    """Raises ``RunError`` if a child has ended without having said that it is done."""
    code = child.exit_code
    if code is None:
        return
    report = read_status(run_dir / "status" / f"{child.name}.json")
    if code == 0 and report is not None and report.state == DONE:
        return
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
    how += " before it was done" if code == 0 else ""
    tail = "\n".join(f"    {line}" for line in child.last_lines())
    raise RunError(f"{child.name} {how}. The end of its log ({child.log}):\n{tail}")
