"""Which process starts on which GPU: by the rules of a run, on machines that need not be here."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from prime_rl import ConfigError, Engine, PrimeRLError
from prime_rl.config.run import RunConfig
from prime_rl.registry.manager import Hooks, disabled_names
from prime_rl.rundir.machine import VISIBLE
from prime_rl_app.config import fitted, load_config
from prime_rl_app.gpus import num_ranks
from prime_rl_app.libraries import weight_notes
from prime_rl_app.resolve import Resolved, check
from prime_rl_plan.devices import Machines


@dataclass(frozen=True)
class Placed:
    """A config with its processes on machines."""

    config: RunConfig
    hooks: Hooks
    engine: Engine
    ranks: int
    places: list[tuple[str, str]]
    notes: list[str]
    is_remote: bool = False
    """The launcher uses all machines, not one."""


@contextmanager
def _visible(count: int) -> Iterator[None]:
    """As on a machine with so many GPUs."""
    before = os.environ.get(VISIBLE)
    os.environ[VISIBLE] = ",".join(map(str, range(count)))
    try:
        yield
    finally:
        del os.environ[VISIBLE]
        if before is not None:
            os.environ[VISIBLE] = before


def read(files: list[str], overrides: list[str], machines: Machines) -> Placed:
    """Read a config as ``prime-rl run`` does on those machines. Raises ``ConfigError``."""
    with _visible(machines.count):
        return _read(files, overrides, machines)


def _read(files: list[str], overrides: list[str], machines: Machines) -> Placed:
    config = load_config([Path(file) for file in files], overrides)
    disabled = {"disabled": (*config.plugins.disabled, *disabled_names())}
    plugins = config.plugins.model_copy(update=disabled)
    config, notes = fitted(config.model_copy(update={"plugins": plugins}))
    resolved = Resolved(config)
    try:
        resolved = check(config)
    except PrimeRLError as error:  # of what this machine lacks, perhaps: an engine, a key
        notes += [f"here prime-rl run would refuse it: {line}" for line in str(error).splitlines()]

    hooks = resolved.hooks
    notes += weight_notes(config, hooks)
    engine = resolved.engine
    if resolved.launcher.is_remote:
        ranks = config.trainer.num_ranks or config.deployment.trainer_nodes
        places = _on_machines(resolved, ranks, machines)
        return Placed(
            config,
            hooks,
            engine=engine,
            ranks=ranks,
            places=places,
            notes=notes,
            is_remote=True,
        )

    gpus = resolved.gpus
    ranks = num_ranks(config, gpus)
    places = []
    for number, numbers in enumerate(gpus.engines or [()] * resolved.num_engines):
        places.append((_numbered("inference", number), _gpus(numbers)))

    trainer = "trainer, 1 rank" if ranks == 1 else f"trainer, {ranks} ranks"
    places.append((trainer, _gpus(gpus.trainer or ())))
    return Placed(
        config,
        hooks,
        engine=engine,
        ranks=ranks,
        places=[*places, ("orchestrator", "CPU")],
        notes=notes,
    )


def _numbered(name: str, number: int) -> str:
    return f"{name}_{number}" if number else name


def _gpus(numbers: tuple[int, ...]) -> str:
    return f"GPU {', '.join(map(str, numbers))}" if numbers else "no GPU of its own"


def _on_machines(resolved: Resolved, ranks: int, machines: Machines) -> list[tuple[str, str]]:
    """Ranks on the first machines, an equal share on each; engines on the GPUs that are left, none
    over two machines. Raises ``ConfigError`` if they do not suffice."""
    engine = resolved.engine
    nodes = resolved.config.deployment.trainer_nodes
    share = ranks // nodes
    free = [list(range(machines.count)) for _ in range(machines.nodes)]
    places = []
    for node in range(nodes):
        if node >= len(free) or len(free[node]) < share:
            raise ConfigError(
                f"trainer.num_ranks: {ranks} ranks on {nodes} machines, and there are "
                f"{machines.nodes} machines of {machines.count} GPUs. Give --gpus more, or lower it"
            )
        of_ranks = free[node][:share]
        free[node] = free[node][share:]
        places.append((_numbered("trainer", node) + f", {share} ranks", _at(node, of_ranks)))

    for number in range(resolved.num_engines):
        roomy = [n for n, left in enumerate(free) if len(left) >= engine.num_gpus]
        if not roomy:
            raise ConfigError(
                f"inference.replicas: no machine has {engine.num_gpus} GPUs left for engine "
                f"{number}. Lower it, or the engine's tensor parallelism, or give --gpus more"
            )

        node = roomy[0]
        of_engine = free[node][: engine.num_gpus]
        free[node] = free[node][engine.num_gpus :]
        places.append((_numbered("inference", number), _at(node, of_engine)))

    idle = [f"{node}: {_gpus(tuple(left))}" for node, left in enumerate(free) if left]
    if idle:
        places.append(("idle", "machine " + "; ".join(idle)))
    return [*places, ("orchestrator", "machine 0, CPU")]


def _at(node: int, numbers: list[int]) -> str:
    return f"machine {node}, {_gpus(tuple(numbers))}"
