"""A config and what the installed plugins make of it, checked before any process starts: names,
settings, resources.

    config -> check -> Resolved -> the supervisor, the launch facts, the commands
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prime_rl import Algorithm, Engine, PluginConfig
from prime_rl.config.contract import FrozenModel
from prime_rl.config.orchestrator import EnvConfig
from prime_rl.config.run import FILES, RunConfig
from prime_rl.entries import installed_entries, names_of
from prime_rl.errors import ConfigError
from prime_rl.plugins.hookspecs import TRAINER_GROUP
from prime_rl.plugins.launchers import Launcher
from prime_rl.plugins.trainer import OptimizerMaker, Tuning
from prime_rl.registry.components import Components
from prime_rl.registry.manager import GROUPS, Hooks, load_plugins
from prime_rl.registry.offers import (
    ENGINE,
    FILTER,
    LAUNCHER,
    LOSS,
    MONITOR,
    OBSERVER,
    RENDERER,
    SAMPLER,
    VIEW,
    bringer,
    choose,
    collect,
    make,
    make_kernel,
    make_observers,
    make_optimizer,
    make_transport,
    make_tuning,
    select,
    settings_of,
)
from prime_rl_app.env_checks import (
    EarlierWeights,
    algorithm_of,
    check_algorithms,
    check_envs,
    check_tasksets,
    earlier_weights,
)
from prime_rl_app.gpus import GpuPlan, check_shares, gpus_of, num_engines, num_ranks
from prime_rl_app.models import build_model_maker, model_path

if TYPE_CHECKING:
    from prime_rl_app.resume import Plan

LAST_PORT = 65535


@dataclass(frozen=True, eq=False)
class Resolved:
    """A config with its parts. Each part is made once, when it is first asked for, or raises
    ``ConfigError``. After ``check`` all are made."""

    config: RunConfig
    resume: str | None = None
    """The checkpoint to resume from, as the user names it."""
    _algorithms: dict[int, Algorithm] = field(default_factory=dict, repr=False)

    @cached_property
    def hooks(self) -> Hooks:
        """The plugins of the orchestrator's side and of this one."""
        return load_plugins(disabled=self.config.plugins.disabled)

    @cached_property
    def trainer_hooks(self) -> Hooks:
        return load_plugins(TRAINER_GROUP, disabled=self.config.plugins.disabled)

    @cached_property
    def engine(self) -> Engine:
        return build_engine(self.config, self.hooks)

    @cached_property
    def launcher(self) -> Launcher:
        return build_launcher(self.config, self.hooks)

    @cached_property
    def losses(self) -> Components:
        return Components.load(self.config.trainer, self.trainer_hooks)

    @cached_property
    def tuning(self) -> Tuning | None:
        """What trains instead of all weights."""
        return make_tuning(self.config.trainer.settings, self.trainer_hooks)

    @cached_property
    def optimizer(self) -> OptimizerMaker:
        return make_optimizer(self.config.trainer.optim, self.trainer_hooks)

    def algorithm(self, number: int) -> Algorithm:
        """The algorithm of a training env."""
        if number not in self._algorithms:
            env = self.config.orchestrator.train.env[number]
            self._algorithms[number] = algorithm_of(env, self.config, self.hooks)
        return self._algorithms[number]

    def algorithms(self) -> Iterator[tuple[EnvConfig, Algorithm]]:
        """Each training env with its algorithm."""
        for number, env in enumerate(self.config.orchestrator.train.env):
            yield env, self.algorithm(number)

    @cached_property
    def earlier_weights(self) -> EarlierWeights:
        algorithms = [algorithm for _, algorithm in self.algorithms()]
        return earlier_weights(self.config, algorithms, self.losses)

    @cached_property
    def gpus(self) -> GpuPlan:
        """The GPUs of this machine for each process."""
        return gpus_of(self.config, self.launcher, self.earlier_weights.engines)

    @property
    def num_engines(self) -> int:
        """Engines that this run starts, those of earlier weights included."""
        return num_engines(self.config, self.earlier_weights.engines)

    @cached_property
    def earlier_run(self) -> Plan | None:
        """What the run continues; None: it is a new one."""
        if self.resume is None:
            return None
        from prime_rl_app.resume import plan  # it needs psutil, of the extra `run`

        return plan(self.config, self.resume, self.tuning, self.optimizer)


def check(config: RunConfig, resume: str | None = None) -> Resolved:
    """Make and check every part of a run. Raises ``ConfigError``, with all that is wrong, or
    ``PluginError``."""
    resolved = Resolved(config, resume)
    hooks = resolved.hooks
    trainer = resolved.trainer_hooks
    _check_disabled(config)
    orchestrator = config.orchestrator
    train = config.trainer
    problems = list[str]()
    sampler = orchestrator.sampler_table
    table = orchestrator.renderer
    model = config.model.name
    losses = Components({"rl": train.loss, **train.losses}, collect(trainer, LOSS))
    where = SAMPLER.key if orchestrator.buffer is None else "orchestrator.buffer"
    parts: list[tuple[Callable[..., object], *tuple[Any, ...]]] = [
        (check_envs, config),
        (train.scheduler.fitted(config.max_steps).check, train.optim.lr, config.max_steps),
        *((resolved.algorithm, number) for number in range(len(orchestrator.train.env))),
        (lambda: check_algorithms(config, hooks, resolved.losses, resolved.algorithms()),),
        *((losses.__getitem__, name) for name in losses.tables),
        (check_filters, config, hooks),
        (build_model_maker, config, hooks),
        (choose, SAMPLER, sampler.type, sampler.settings, hooks, where),
        (lambda: make(RENDERER, table.name, table.settings, hooks, RENDERER.key).check(model),),
        *((choose, MONITOR, n, t, hooks, f"monitors.{n}") for n, t in config.monitors.items()),
        (_check_observers, config, hooks),
        (choose, VIEW, config.view.type, config.view.settings, hooks, "view"),
        (check_engine, resolved),
        (_check_deployment, resolved),
        (_check_broadcast, resolved),
        (_check_keys, resolved),
        (make_observers, train.settings, trainer),
        (make_kernel, train, trainer),
        (lambda: resolved.optimizer,),
        (lambda: check_tasksets(config, resolved.algorithms()),),
    ]
    for part, *arguments in parts:
        try:
            part(*arguments)
        except ConfigError as error:
            if not any(known.endswith(str(error)) for known in problems):  # found by two parts
                problems.append(str(error))

    if problems:
        raise ConfigError("\n".join(problems))
    check_tuning(resolved)
    _ = resolved.earlier_run  # it may refuse
    return resolved


def build_engine(config: RunConfig, hooks: Hooks) -> Engine:
    """The engine plugin with its settings; the base class where the run starts none. Raises
    ``ConfigError``."""
    inference = config.inference
    if inference.base_url is not None:
        return Engine(PluginConfig())
    cls = select(ENGINE, inference.engine, collect(hooks, ENGINE), "inference.engine")
    where = f"inference.{inference.engine}"
    unread = [key for key in inference.model_extra or {} if key != inference.engine]
    if unread and (unread[0] in collect(hooks, ENGINE) or bringer(ENGINE.name, unread[0])):
        raise ConfigError(
            f"inference.{unread[0]}: has the settings of the engine {unread[0]!r}, and "
            f"inference.engine is {inference.engine!r}. Set inference.engine = "
            f'"{unread[0]}", or leave the table out.'
        )
    if unread:
        raise ConfigError(
            f"inference.{unread[0]}: unknown key; the engine's own settings go into [{where}]"
        )

    return cls(settings_of(cls, ENGINE, inference.settings, where))


def build_launcher(config: RunConfig, hooks: Hooks) -> Launcher:
    """The launcher plugin with its settings. Raises ``ConfigError``."""
    table = config.launcher
    return make(LAUNCHER, table.type, table.settings, hooks, "launcher")


def check_tuning(resolved: Resolved) -> None:
    """The run's tuning fits the model. Raises ``ConfigError``."""
    if resolved.tuning is not None:
        path, _ = model_path(resolved.config, resolved.hooks)
        resolved.tuning.check(Path(path))


def check_engine(resolved: Resolved) -> None:
    """Whether the engine can be started here, or new weights be sent to one that runs already.
    Raises ``ConfigError``."""
    config = resolved.config
    variable = config.inference.admin_key_var
    if config.inference.base_url is None:
        resolved.engine.check(config.inference.interpreter)
    elif not os.environ.get(variable):
        raise ConfigError(
            "inference.base_url: new weights need the key of the engines' admin routes, and the "
            f"environment variable {variable} (inference.admin_key_var) is not set, or empty. "
            "Export the key they were started with; prime-rl serve --show-admin-key prints it."
        )
    elif config.deployment.colocated:
        raise ConfigError(
            "deployment.colocated has engines and trainer take turns on one GPU, and "
            "inference.base_url names engines that this run does not start. Leave one of them out."
        )


def _check_deployment(resolved: Resolved) -> None:
    """Launcher, GPUs and ranks are consistent; published weights have the engine's precision."""
    config = resolved.config
    launcher = resolved.launcher
    nodes = config.deployment.trainer_nodes
    if nodes > 1 and not launcher.is_remote:
        raise ConfigError(
            f"deployment.trainer_nodes is {nodes}, and launcher {config.launcher.type!r} starts "
            "processes on this machine only. Set trainer_nodes to 1, or launcher.type to one for "
            "several machines ('ray')."
        )

    gpus = resolved.gpus
    _check_ports(resolved, num_ranks(config, gpus))
    if config.inference.base_url is not None:
        return
    engine = resolved.engine
    check_shares(gpus, engine.num_gpus)
    if config.trainer.publish_dtype == "bfloat16" and engine.dtype not in (None, "bfloat16"):
        raise ConfigError(
            f"trainer.publish_dtype is 'bfloat16', and inference.{config.inference.engine}.dtype "
            f"is {engine.dtype!r}: the engine would serve weights of less precision than it "
            "computes in. Set both to 'bfloat16', or leave publish_dtype out."
        )


def _check_ports(resolved: Resolved, ranks: int) -> None:
    """Fixed ports exist, and on one machine no two processes are to listen at the same."""
    config = resolved.config
    wire = config.rollout_transport
    engines = 0 if config.inference.base_url is not None else resolved.num_engines
    wire_ports = 0 if wire.type == FILES else ranks
    taken: dict[int, str] = {}
    for key, first, number in (
        ("inference.port", config.inference.port, engines),
        ("rollout_transport.port", wire.port, wire_ports),
    ):
        if first is None or not number:
            continue
        last = first + number - 1
        if last > LAST_PORT:
            raise ConfigError(
                f"{key} is the first of {number} ports, and {first} leaves only "
                f"{LAST_PORT - first + 1}. Set it to {LAST_PORT - number + 1} or less, or leave it "
                "out."
            )
        for port in range(first, last + 1):
            if port in taken and not resolved.launcher.is_remote:
                raise ConfigError(
                    f"{key}: port {port} is that of {taken[port]} too, which takes the ports "
                    "that follow its first. Move one of them, or leave one out."
                )
            taken[port] = key


def _check_keys(resolved: Resolved) -> None:
    """The keys of frozen models are in the environment, if their processes inherit ours."""
    if resolved.launcher.is_remote:
        return
    config = resolved.config
    models = {"orchestrator.initial": config.orchestrator.initial}
    for env, algorithm in resolved.algorithms():
        algo = env.algo or config.orchestrator.algo
        where = f"env {env.label!r}: algo"
        models[f"{where}.sampling.source"] = algo.sampling.source  # type: ignore[assignment]
        models |= {f"{where}.{name}": value for name, value in algorithm.config}

    for where, model in models.items():
        variable = model.api_key_var if isinstance(model, FrozenModel) else None
        if variable is not None and not os.environ.get(variable):
            raise ConfigError(
                f"{where}: api_key_var is {variable!r}, and the environment has no such variable, "
                "or an empty one. Export it, or leave api_key_var out if the endpoint needs no key."
            )


def _check_broadcast(resolved: Resolved) -> None:
    """The weight transport is installed on both sides, and the trainer can send by it."""
    config = resolved.config
    table = config.weight_broadcast
    sides = (resolved.hooks, resolved.trainer_hooks)
    transports = [make_transport(table, hooks) for hooks in sides]
    tuning = resolved.tuning
    if table.as_files:
        return
    on_shared = [each is not None and each.shares_gpus for each in transports]
    takes_turns = config.deployment.colocated and not all(on_shared)
    for where, is_so, why in (
        (f"trainer.{tuning and tuning.name}", tuning, "adapters are published as files"),
        ("deployment.colocated", takes_turns, "it cannot send to engines on the trainer's GPU"),
    ):
        if is_so:
            raise ConfigError(
                f"weight_broadcast.type is {table.type!r}, which does not go with {where}: {why}. "
                "Set it to 'filesystem', or change the other."
            )

    for transport in transports:
        if transport is not None:
            transport.check(config.trainer.device)


def _check_observers(config: RunConfig, hooks: Hooks) -> None:
    """Their tables are valid, and a key that asks for an observer finds it."""
    installed = collect(hooks, OBSERVER)
    keys = ("orchestrator.eval.env", "orchestrator.save_rollouts", "orchestrator.weights_timeout")
    for key in (*keys, "ckpt.best", "stop.metric"):
        *path, name = key.split(".")
        table = reduce(getattr, path, config)
        is_set = name in table.model_fields_set and getattr(table, name)
        if is_set and not any(key in each.cls.reads for each in installed.values()):
            raise ConfigError(
                f"{key}: no installed observer reads it (installed: {', '.join(installed)}). "
                f"Install the package that brings one: pip install {bringer('key', key)}"
            )

    for name in {**installed, **config.observers}:
        settings = config.observers.get(name, {})
        choose(OBSERVER, name, settings, hooks, f"observers.{name}")[0].check(config)


def _check_disabled(config: RunConfig) -> None:
    entries = [entry for group in GROUPS for entry in installed_entries(group)]
    installed = {entry.name for entry in entries}
    for name in config.plugins.disabled:
        if not any(name in names_of(entry) for entry in entries):
            raise ConfigError(
                f"plugins.disabled: no installed plugin is called {name!r} "
                f"(installed: {', '.join(sorted(installed))})"
            )


def check_filters(config: RunConfig, hooks: Hooks) -> None:
    """Each filter is installed, and listed once in its slot. Raises ``ConfigError``."""
    for slot in ("pre_batch_filters", "post_batch_filters"):
        where = f"orchestrator.{slot}"
        filters = getattr(config.orchestrator, slot)
        counts = Counter(filter.type for filter in filters)
        for filter in filters:
            if counts[filter.type] > 1:
                raise ConfigError(
                    f"{where}: filter {filter.type!r} is listed {counts[filter.type]} times"
                )
            choose(FILTER, filter.type, filter.settings, hooks, where)
