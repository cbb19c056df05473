"""A config and what the installed plugins make of it, checked before any process starts: names,
settings, resources.

    config -> check -> Resolved -> the supervisor, the launch facts, the commands
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial, reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prime_rl import Algorithm, Engine, PluginConfig
from prime_rl.config.contract import FrozenModel
from prime_rl.config.orchestrator import EnvConfig, SourceTable
from prime_rl.config.run import FILES, RunConfig
from prime_rl.config.trainer import EXPERT_KEYS, ROUTER_BIASES
from prime_rl.entries import disabled, installed_entries, names_of
from prime_rl.env.rendering import number_in_config
from prime_rl.errors import ConfigError, PluginError
from prime_rl.orchestrator.agents import parts_of
from prime_rl.plugins.hookspecs import PROJECT, TRAINER_GROUP
from prime_rl.plugins.launchers import Launcher
from prime_rl.plugins.trainer import OptimizerMaker, Tuning
from prime_rl.registry.components import Components
from prime_rl.registry.manager import Hooks, load_plugins, plugin_names
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
    unreached_observers,
)
from prime_rl.rundir.launch import PAST
from prime_rl.variables import check_exported, check_headers
from prime_rl_app.commands import check_command, check_variables
from prime_rl_app.env_checks import (
    EarlierWeights,
    algorithm_of,
    check_algorithms,
    check_envs,
    check_tasksets,
    check_trains,
    earlier_weights,
)
from prime_rl_app.gpus import GpuPlan, check_shares, gpus_of, num_engines, num_ranks
from prime_rl_app.models import build_model_maker, model_path, tensor_names

if TYPE_CHECKING:
    from prime_rl_app.resume import ResumePlan

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
    def earlier_run(self) -> ResumePlan | None:
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
    _check_reached(config, hooks, trainer)
    orchestrator = config.orchestrator
    train = config.trainer
    problems = list[str]()
    sampler = orchestrator.sampler
    losses = Components({"rl": train.loss, **train.losses}, collect(trainer, LOSS))
    parts: list[tuple[Callable[..., object], *tuple[Any, ...]]] = [
        (check_envs, config),
        (train.scheduler.fitted(config.max_steps).check, train.optim.lr, config.max_steps),
        *((resolved.algorithm, number) for number in range(len(orchestrator.train.env))),
        (lambda: check_algorithms(config, hooks, resolved.losses, resolved.algorithms()),),
        *((losses.__getitem__, name) for name in losses.tables),
        (check_filters, config, hooks),
        (build_model_maker, config, hooks),
        (choose, SAMPLER, sampler.type, sampler.settings, hooks, SAMPLER.key),
        (_check_renderer, config, hooks),
        *((_check_monitor, name, config, hooks) for name in config.monitors),
        (_check_observers, config, hooks),
        (choose, VIEW, config.view.type, config.view.settings, hooks, "view"),
        (check_engine, resolved),
        (_check_deployment, resolved),
        (_check_broadcast, resolved),
        (_check_keys, resolved),
        (check_variables, config),
        (_check_trainer_observers, config, trainer),
        (make_kernel, train, trainer),
        (lambda: resolved.optimizer,),
        (lambda: check_tasksets(config, resolved.algorithms()),),
    ]
    for part, *arguments in parts:
        try:
            part(*arguments)
        except ConfigError as error:
            # Two parts may find one problem, and one of them knows its place.
            problem = str(error)
            if not any(known.endswith(problem) for known in problems):
                problems = [known for known in problems if not problem.endswith(f": {known}")]
                problems.append(problem)

    if problems:
        raise ConfigError("\n".join(problems))
    check_tuning(resolved)
    _ = resolved.earlier_run  # it may refuse
    return resolved


def check_settings(config: RunConfig) -> None:
    """The tables of plugins that need no machine, model or environment: names and keys. Raises
    ``ConfigError``, with all that is wrong."""
    resolved = Resolved(config)
    train = config.trainer
    envs = config.orchestrator.train.env
    sampler = config.orchestrator.sampler
    offers = collect(resolved.trainer_hooks, LOSS)
    losses = Components({"rl": train.loss, **train.losses}, offers)
    parts: list[Callable[[], object]] = [
        partial(check_trains, config),
        # Agents are known by the taskset, which may not be installed here.
        *(partial(resolved.algorithm, each) for each, env in enumerate(envs) if not env.agents),
        *(partial(losses.__getitem__, name) for name in losses.tables),
        lambda: resolved.optimizer,
        lambda: resolved.tuning,
        lambda: choose(SAMPLER, sampler.type, sampler.settings, resolved.hooks, SAMPLER.key),
    ]
    if config.model.settings:
        parts.append(lambda: build_model_maker(config, resolved.hooks))

    problems = list[str]()
    for part in parts:
        try:
            part()
        except ConfigError as error:
            problems += [line for line in str(error).splitlines() if line not in problems]
    if problems:
        raise ConfigError("\n".join(problems))


def build_engine(config: RunConfig, hooks: Hooks) -> Engine:
    """The engine plugin with its settings; the base class where the run starts none. Raises
    ``ConfigError``."""
    inference = config.inference
    if inference.base_url is not None:
        return Engine(PluginConfig())
    cls = select(ENGINE, inference.engine, offers=collect(hooks, ENGINE), where="inference.engine")
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

    return cls(settings_of(cls, ENGINE, settings=inference.settings, where=where))


def build_launcher(config: RunConfig, hooks: Hooks) -> Launcher:
    """The launcher plugin with its settings. Raises ``ConfigError``."""
    table = config.launcher
    return make(LAUNCHER, table.type, table=table.settings, hooks=hooks, where="launcher")


def _check_renderer(config: RunConfig, hooks: Hooks) -> None:
    """It is installed, and renders for the model."""
    table = config.orchestrator.renderer
    renderer = make(RENDERER, table.name, table=table.settings, hooks=hooks, where=RENDERER.key)
    renderer.check(config.model.name)


def check_tuning(resolved: Resolved) -> None:
    """The run's tuning fits the model. Raises ``ConfigError``."""
    if resolved.tuning is not None:
        past = resolved.config.orchestrator.past
        if past.base_url or PAST in resolved.earlier_weights.engines:
            raise ConfigError(
                f"trainer.{resolved.tuning.name} publishes adapters, and earlier versions of the "
                "policy (orchestrator.past) are kept as whole models. Train all weights, or leave "
                'out model = "past" and algorithms that read host.past.'
            )
        if resolved.config.trainer.balance_bias:
            raise ConfigError(
                f"trainer.balance_bias is set, and adapters (trainer.{resolved.tuning.name}) are "
                "published without the biases of routers. Leave one of them out."
            )
        path, _ = model_path(resolved.config, resolved.hooks)
        resolved.tuning.check(Path(path))


def check_engine(resolved: Resolved) -> None:
    """Whether the engine can be started here, or new weights be sent to one that runs already.
    Raises ``ConfigError``."""
    config = resolved.config
    variable = config.inference.admin_key_var
    if not config.has_engines:
        _check_nothing_samples(config)
    elif config.inference.base_url is None:
        resolved.engine.check(config.inference.interpreter)
        check_command(config, resolved.engine)
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


def _check_nothing_samples(config: RunConfig) -> None:
    """A run without engines takes all of its data from sources. Raises ``ConfigError``."""
    orchestrator = config.orchestrator
    sampling = [
        f"orchestrator.train.env {env.label!r}"
        for env in orchestrator.train.env
        if not isinstance((env.algo or orchestrator.algo).sampling.source, SourceTable)
    ]
    sampling += [f"orchestrator.eval.env {env.label!r}" for env in orchestrator.eval.env]
    if sampling:
        raise ConfigError(
            f"inference.replicas is 0, and {sampling[0]} samples from the policy, which takes an "
            "engine. Set inference.replicas to 1, or remove the env."
        )
    if config.deployment.colocated:
        raise ConfigError(
            "deployment.colocated has engines and trainer take turns on one GPU, and the run has "
            "no engine (inference.replicas is 0). Leave one of them out."
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
    ranks = num_ranks(config, gpus)
    _check_ports(resolved, ranks)
    check_layout(config, resolved.hooks, ranks)
    check_routers(config, resolved.hooks)
    if config.inference.base_url is not None or not config.has_engines:
        return
    engine = resolved.engine
    check_shares(gpus, engine.num_gpus)
    if config.trainer.publish_dtype == "bfloat16" and engine.dtype not in (None, "bfloat16"):
        raise ConfigError(
            f"trainer.publish_dtype is 'bfloat16', and inference.{config.inference.engine}.dtype "
            f"is {engine.dtype!r}: the engine would serve weights of less precision than it "
            "computes in. Set both to 'bfloat16', or leave publish_dtype out."
        )


def check_layout(config: RunConfig, hooks: Hooks, ranks: int) -> None:
    """The ranks can have equally many attention heads and experts, as far as the model's folder
    says. Raises ``ConfigError``."""
    trainer = config.trainer
    if trainer.context_parallel == 1 and not trainer.sends_tokens:
        return

    path, _ = model_path(config, hooks)
    heads = number_in_config(Path(path), "num_attention_heads")
    numbers = [number_in_config(Path(path), key) for key in EXPERT_KEYS]
    experts = next((number for number in numbers if number), None)
    if experts is None and heads is not None and not _speaks_of_experts(Path(path)):
        experts = 0
    trainer.check_layout(config.model.name, num_ranks=ranks, num_heads=heads, num_experts=experts)


def check_routers(config: RunConfig, hooks: Hooks) -> None:
    """The routers can be balanced as the trainer is to, as far as the model's files say. Raises
    ``ConfigError``."""
    trainer = config.trainer
    if not (trainer.balance_loss or trainer.balance_bias):
        return
    path, _ = model_path(config, hooks)
    names = tensor_names(Path(path))
    biases = [name for name in names if name.endswith(ROUTER_BIASES)]
    if trainer.balance_loss and biases:
        raise ConfigError(
            f"trainer.balance_loss: the routers of {config.model.name!r} rank experts with a bias "
            f"that balances them ({biases[0]}), and there is no probability to even out. Set "
            "trainer.balance_bias = 0.001 instead."
        )

    # Some families call it so in their files; the trainer finds the buffer or refuses.
    may_be_biases = [name for name in names if name.endswith("gate.bias")]
    if trainer.balance_bias and names and not (biases or may_be_biases):
        raise ConfigError(
            f"trainer.balance_bias: no router of {config.model.name!r} has a bias (expected a "
            f"tensor named {' or '.join(ROUTER_BIASES)}, as DeepSeek V3 and GLM-4.5 have). Set "
            "trainer.balance_loss = 0.001 instead, if the model is a mixture."
        )


def _speaks_of_experts(path: Path) -> bool:
    """Whether a model's ``config.json`` has a key of experts, under whatever name."""
    return "expert" in (path / "config.json").read_text("utf-8", errors="replace")


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
        for part in parts_of(algorithm):
            table = where if part.agent is None else f"env {env.label!r}: agents.{part.agent}.algo"
            models |= {f"{table}.{name}": value for name, value in part.algorithm.config}

    for where, model in models.items():
        if isinstance(model, FrozenModel):
            check_exported(model, where)
    check_headers(config.inference.headers_from_env, "inference")


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
    keys = ("orchestrator.eval.env", "orchestrator.save_rollouts", "ckpt.best", "stop.metric")
    for key in keys:
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
        choose(OBSERVER, name, table=settings, hooks=hooks, where=f"observers.{name}")[0].check(
            config
        )


def _check_monitor(name: str, config: RunConfig, hooks: Hooks) -> None:
    table = config.monitors[name]
    choose(MONITOR, name, table=table, hooks=hooks, where=f"monitors.{name}")[0].check(config)


def _check_trainer_observers(config: RunConfig, trainer: Hooks) -> None:
    """Their tables are valid, and they accept the config."""
    for observer in make_observers(config.trainer.settings, trainer):
        observer.check(config)


def _check_reached(config: RunConfig, hooks: Hooks, trainer: Hooks) -> None:
    """Each offered observer is loaded by the process in which it runs. Raises ``PluginError``."""
    left_out = disabled().union(config.plugins.disabled)
    partly = {
        entry.dist.name
        for group in (PROJECT, TRAINER_GROUP)
        for entry in installed_entries(group)
        if entry.dist is not None and left_out & names_of(entry)
    }
    problems = unreached_observers(hooks, trainer, partly=partly)
    if problems:
        raise PluginError("\n".join(problems))


def _check_disabled(config: RunConfig) -> None:
    for name in config.plugins.disabled:
        known = plugin_names()
        if name not in known:
            raise ConfigError(
                f"plugins.disabled: no installed plugin is called {name!r} "
                f"(installed: {', '.join(sorted(known))})"
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
            choose(FILTER, filter.type, table=filter.settings, hooks=hooks, where=where)
