"""Config checks with the plugins loaded, before any process starts: names, settings, resources."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from functools import reduce
from pathlib import Path
from typing import Any

from prime_rl import Engine, ModelMaker, PluginConfig
from prime_rl.config.run import ModelSource, RunConfig
from prime_rl.entries import installed_entries, names_of
from prime_rl.errors import ConfigError
from prime_rl.plugins.hookspecs import TRAINER_GROUP
from prime_rl.plugins.launchers import Launcher
from prime_rl.registry.components import Components
from prime_rl.registry.manager import GROUPS, Hooks, load_plugins
from prime_rl.registry.offers import (
    ENGINE,
    FILTER,
    LAUNCHER,
    LOSS,
    MODEL,
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
from prime_rl_app.env_checks import algorithm_of, check_algorithms, check_envs, check_tasksets
from prime_rl_app.gpus import check_shares, gpus_of, num_ranks


def check(config: RunConfig) -> Hooks:
    """Check a config against the installed plugins. Returns the loaded plugins; raises
    ``ConfigError``, with all that is wrong, or ``PluginError``."""
    hooks = load_plugins(disabled=config.plugins.disabled)
    trainer = load_plugins(TRAINER_GROUP, disabled=config.plugins.disabled)
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
        *((algorithm_of, env, config, hooks) for env in orchestrator.train.env),
        (lambda: check_algorithms(config, hooks, Components.load(train, trainer)),),
        *((losses.__getitem__, name) for name in losses.tables),
        (check_filters, config, hooks),
        (build_model_maker, config, hooks),
        (choose, SAMPLER, sampler.type, sampler.settings, hooks, where),
        (lambda: make(RENDERER, table.name, table.settings, hooks, RENDERER.key).check(model),),
        *((choose, MONITOR, n, t, hooks, f"monitors.{n}") for n, t in config.monitors.items()),
        (_check_observers, config, hooks),
        (choose, VIEW, config.view.type, config.view.settings, hooks, "view"),
        (check_engine, config, hooks),
        (_check_deployment, config, hooks),
        (_check_broadcast, config, hooks, trainer),
        (make_observers, train.settings, trainer),
        (make_kernel, train, trainer),
        (make_optimizer, train.optim, trainer),
        (check_tasksets, config, hooks),
    ]
    for part, *arguments in parts:
        try:
            part(*arguments)
        except ConfigError as error:
            if not any(known.endswith(str(error)) for known in problems):  # found by two parts
                problems.append(str(error))

    if problems:
        raise ConfigError("\n".join(problems))
    return hooks


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


def build_model_maker(config: ModelSource, hooks: Hooks) -> ModelMaker | None:
    """The plugin that makes ``model.name``, or None if it is a folder or a hub id. Raises
    ``ConfigError``."""
    offers = collect(hooks, MODEL)
    model = config.model
    folder = Path(model.name)
    if model.name in offers and not folder.exists():
        cls = offers[model.name].cls
        return cls(settings_of(cls, MODEL, model.settings, "model"))

    if model.settings:
        raise ConfigError(f"model.{next(iter(model.settings))}: unknown key of a checkpoint")
    # A path to a missing folder may look like a hub id.
    is_path = model.name.startswith((".", "/", "~")) or model.name.count("/") > 1
    is_path = is_path or ("/" in model.name and folder.parent.is_dir())
    if not folder.is_dir():
        if is_path or "/" not in model.name:
            raise ConfigError(
                f"model.name: {model.name!r} is no folder, no hub id (owner/name), and no model "
                f"that an installed plugin makes (those are: {', '.join(offers) or 'none'})"
            )
    elif not (folder / "config.json").exists():
        raise ConfigError(
            f"model.name: {folder} has no config.json; expected a Hugging Face folder"
        )
    elif (folder / "adapter_config.json").exists() and not any(folder.glob("model*.safetensors")):
        raise ConfigError(
            f"model.name: {folder} holds a LoRA adapter without its base. The model that its run "
            "exported, RUN/weights, has the adapter merged in."
        )

    return None


def check_engine(config: RunConfig, hooks: Hooks) -> None:
    """Whether the engine can be started here, or new weights be sent to one that runs already.
    Raises ``ConfigError``."""
    variable = config.inference.admin_key_var
    if config.inference.base_url is None:
        build_engine(config, hooks).check(config.inference.interpreter)
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


def _check_deployment(config: RunConfig, hooks: Hooks) -> None:
    """Launcher, GPUs and ranks are consistent; published weights have the engine's precision."""
    launcher = build_launcher(config, hooks)
    nodes = config.deployment.trainer_nodes
    if nodes > 1 and not launcher.is_remote:
        raise ConfigError(
            f"deployment.trainer_nodes is {nodes}, and launcher {config.launcher.type!r} starts "
            "processes on this machine only. Set trainer_nodes to 1, or launcher.type to one for "
            "several machines ('ray')."
        )

    gpus = gpus_of(config, launcher)
    num_ranks(config, gpus)
    if config.inference.base_url is not None:
        return
    engine = build_engine(config, hooks)
    check_shares(gpus, engine.num_gpus)
    if config.trainer.publish_dtype == "bfloat16" and engine.dtype not in (None, "bfloat16"):
        raise ConfigError(
            f"trainer.publish_dtype is 'bfloat16', and inference.{config.inference.engine}.dtype "
            f"is {engine.dtype!r}: the engine would serve weights of less precision than it "
            "computes in. Set both to 'bfloat16', or leave publish_dtype out."
        )


def _check_broadcast(config: RunConfig, *sides: Hooks) -> None:
    """The weight transport is installed on both sides, and the trainer can send by it."""
    table = config.weight_broadcast
    transports = [make_transport(table, hooks) for hooks in sides]
    tuning = make_tuning(config.trainer.settings, sides[-1])
    if table.as_files:
        return
    for where, is_so, why in (
        (f"trainer.{tuning and tuning.name}", tuning, "adapters are published as files"),
        ("deployment.colocated", config.deployment.colocated, "engines that wake read files"),
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
