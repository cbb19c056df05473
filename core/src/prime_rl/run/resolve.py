"""Config checks with the plugins loaded, before any process starts: names, settings, resources."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prime_rl.adapter import is_adapter
from prime_rl.config.load import installed_defaults
from prime_rl.config.models import FrozenModel
from prime_rl.config.orchestrator import (
    AlgoConfig,
    AlgoSamplingConfig,
    EnvConfig,
    FilterConfig,
    SourceTable,
)
from prime_rl.config.run import ModelSource, RunConfig
from prime_rl.env.environment import EnvSettings, check_taskset, find_agents
from prime_rl.errors import ConfigError
from prime_rl.plugins.base import (
    Algorithm,
    Engine,
    Filter,
    ModelMaker,
    PluginConfig,
    RendererOffer,
)
from prime_rl.plugins.hookspecs import TRAINER_GROUP
from prime_rl.plugins.launchers import Launcher
from prime_rl.plugins.manager import Hooks, installed_entries, load_plugins
from prime_rl.plugins.offers import (
    ALGORITHM,
    ENGINE,
    FILTER,
    LAUNCHER,
    LOSS,
    MODEL,
    MONITOR,
    RENDERER,
    SAMPLER,
    SOURCE,
    Kind,
    Offered,
    collect,
    select,
    settings_of,
)
from prime_rl.run.config_checks import check_envs, check_sizes
from prime_rl.run.gpus import check_shares, gpus_of, num_ranks
from prime_rl.weights.transports import make_transport


def check(config: RunConfig) -> Hooks:
    """Check a config against the installed plugins. Returns the loaded plugins; raises
    ``ConfigError`` or ``PluginError``."""
    hooks = load_plugins(disabled=config.plugins.disabled)
    trainer = load_plugins(TRAINER_GROUP, disabled=config.plugins.disabled)
    _check_disabled(config, hooks, trainer)
    check_envs(config)
    check_sizes(config)
    config.trainer.scheduler.check(config.trainer.optim.lr, config.max_steps)
    _check_algorithms(config, hooks)
    _check_filters(config, hooks)
    build_model_maker(config, hooks)  # before the renderer, which depends on the model
    orchestrator = config.orchestrator
    sampler = orchestrator.sampler_table
    where = SAMPLER.key if orchestrator.buffer is None else "orchestrator.buffer"
    _check(SAMPLER, sampler.type, sampler.settings, hooks, where)
    _check_renderer(config, hooks)
    for name, table in config.monitors.items():
        _check(MONITOR, name, table, hooks, f"monitors.{name}")
    check_engine(config, hooks)
    _check_deployment(config, hooks)
    _check_broadcast(config, hooks, trainer)
    _check(LOSS, config.trainer.loss.type, config.trainer.loss.settings, trainer, "trainer.loss")
    for label in ("train", "eval"):
        for number, env in enumerate(getattr(orchestrator, label).env):
            check_taskset(env.id, f"orchestrator.{label}.env.{number}.id")
    _check_agents(config, hooks)
    return hooks


def build_engine(config: RunConfig, hooks: Hooks) -> Engine:
    """The engine plugin with its settings; the base class where the run starts none. Raises
    ``ConfigError``."""
    inference = config.inference
    if inference.base_url is not None:
        return Engine(PluginConfig())
    cls = select(ENGINE, inference.engine, collect(hooks, ENGINE), "inference.engine")
    if inference.unread:
        raise ConfigError(
            f"inference.{inference.unread[0]}: unknown key; the engine's own settings go into "
            f"[inference.{inference.engine}]"
        )
    where = f"inference.{inference.engine}"
    return cls(settings_of(cls, ENGINE, inference.settings, where))


def check_engine(config: RunConfig, hooks: Hooks) -> None:
    """Whether the engine can be started here, or be steered elsewhere. Raises ``ConfigError``."""
    if config.inference.base_url is None:
        build_engine(config, hooks).check(config.inference.interpreter)
    else:
        _check_elsewhere(config)


def _check_deployment(config: RunConfig, hooks: Hooks) -> None:
    """Launcher, GPUs and ranks are consistent."""
    gpus = gpus_of(config, build_launcher(config, hooks))
    num_ranks(config, gpus)
    if config.inference.base_url is None:
        engine = build_engine(config, hooks)
        check_shares(gpus, engine.num_gpus)
        _check_precision(config, engine.dtype)


def _check_precision(config: RunConfig, served: str | None) -> None:
    """Published weights have the precision of the engine."""
    if config.trainer.publish_dtype == "bfloat16" and served not in (None, "bfloat16"):
        name = config.inference.engine
        raise ConfigError(
            f"trainer.publish_dtype is 'bfloat16', and inference.{name}.dtype is {served!r}: the "
            "engine would serve weights of less precision than it computes in. Set both to "
            "'bfloat16', or leave publish_dtype out."
        )


def _check_broadcast(config: RunConfig, *sides: Hooks) -> None:
    """The weight transport is installed on both sides, and the trainer can send by it."""
    table = config.weight_broadcast
    transports = [make_transport(table, hooks) for hooks in sides]
    if table.as_files:
        return
    for where, is_so, why in (
        ("trainer.lora", config.trainer.lora is not None, "adapters are published as files"),
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


def _check_elsewhere(config: RunConfig) -> None:
    """Engines that run already need an admin key and no colocation."""
    variable = config.inference.admin_key_var
    if not os.environ.get(variable):
        raise ConfigError(
            "inference.base_url: new weights need the key of the engines' admin routes, and the "
            f"environment variable {variable} (inference.admin_key_var) is not set, or empty. "
            "Export the key they were started with; prime-rl serve --show-admin-key prints it."
        )
    if config.deployment.colocated:
        raise ConfigError(
            "deployment.colocated has engines and trainer take turns on one GPU, and "
            "inference.base_url names engines that this run does not start. Leave one of them out."
        )


def build_launcher(config: RunConfig, hooks: Hooks) -> Launcher:
    """The launcher plugin with its settings. Raises ``ConfigError``."""
    table = config.launcher
    cls = select(LAUNCHER, table.type, collect(hooks, LAUNCHER), "launcher.type")
    return cls(settings_of(cls, LAUNCHER, table.settings, "launcher"))


def build_model_maker(config: ModelSource, hooks: Hooks) -> ModelMaker | None:
    """The plugin that makes ``model.name``, or None if it is a folder or a hub id. Raises
    ``ConfigError``."""
    offers, model = collect(hooks, MODEL), config.model
    if model.name in offers and not Path(model.name).exists():
        cls = offers[model.name].cls
        return cls(settings_of(cls, MODEL, model.settings, "model"))
    if model.settings:
        raise ConfigError(f"model.{next(iter(model.settings))}: unknown key of a checkpoint")
    # A path to a missing folder may look like a hub id.
    is_path = model.name.startswith((".", "/", "~")) or model.name.count("/") > 1
    is_path = is_path or ("/" in model.name and Path(model.name).parent.is_dir())
    if Path(model.name).is_dir():
        _check_folder(Path(model.name))
    elif is_path or "/" not in model.name:
        made = ", ".join(offers) or "none"
        raise ConfigError(
            f"model.name: {model.name!r} is no folder, no hub id (owner/name), and no model that "
            f"an installed plugin makes (those are: {made})"
        )
    return None


def _check_folder(folder: Path) -> None:
    if not (folder / "config.json").exists():
        raise ConfigError(
            f"model.name: {folder} has no config.json; expected a Hugging Face folder"
        )
    if is_adapter(folder) and not any(folder.glob("model*.safetensors")):
        raise ConfigError(
            f"model.name: {folder} holds a LoRA adapter without its base. The model that its run "
            "exported, RUN/weights, has the adapter merged in."
        )


def _check_renderer(config: RunConfig, hooks: Hooks) -> None:
    table, where = config.orchestrator.renderer, RENDERER.key
    cls = _renderer_class(config, hooks)
    cls(settings_of(cls, RENDERER, table.settings, where)).check(config.model.name)


def _renderer_class(config: RunConfig, hooks: Hooks) -> type[RendererOffer]:
    return select(
        RENDERER, config.orchestrator.renderer.name, collect(hooks, RENDERER), RENDERER.key
    )


def _check_disabled(config: RunConfig, *loaded: Hooks) -> None:
    installed = {entry.name for hooks in loaded for entry in installed_entries(hooks.group)}
    for name in config.plugins.disabled:
        if name not in installed:
            raise ConfigError(
                f"plugins.disabled: no installed plugin is called {name!r} "
                f"(installed: {', '.join(sorted(installed))})"
            )


def _check_algorithms(config: RunConfig, hooks: Hooks) -> None:
    offers = collect(hooks, ALGORITHM)
    shared = config.orchestrator.algo
    default = installed_defaults().get("orchestrator", {}).get("algo", {})
    if shared not in (AlgoConfig(), AlgoConfig(**default)) and all(
        env.algo for env in config.orchestrator.train.env
    ):
        cls = select(ALGORITHM, shared.type, offers, "orchestrator.algo")
        settings_of(cls, ALGORITHM, shared.settings, "orchestrator.algo")
    for env in config.orchestrator.train.env:
        algo, where = env.algo or config.orchestrator.algo, f"env {env.label!r}: algo"
        cls = select(ALGORITHM, algo.type, offers, where)
        settings_of(cls, ALGORITHM, algo.settings, where)
        _check_group_size(config, env, cls)
        here = f"env {env.label!r}: algorithm {cls.name!r}"
        _check_source(here, cls, algo.sampling, hooks)
        _check_temperature(here, cls, env, config)
        if isinstance(algo.sampling.source, SourceTable):
            _check_unsampled(here, env)
        if cls.needs_attribution and not _renderer_class(config, hooks).gives_attribution:
            raise ConfigError(
                f"env {env.label!r}: algorithm {cls.name!r} tells tokens apart by their message's "
                f"role and body, and renderer {config.orchestrator.renderer.name!r} does not tell "
                "it. Set orchestrator.renderer.name to the renderer of the model's family."
            )


def _check_agents(config: RunConfig, hooks: Hooks) -> None:
    """Run ``Algorithm.check_agents`` for each env; last, because it takes seconds."""
    for env in config.orchestrator.train.env:
        algo, where = env.algo or config.orchestrator.algo, f"env {env.label!r}: algo"
        cls = select(ALGORITHM, algo.type, collect(hooks, ALGORITHM), where)
        if cls.check_agents is not Algorithm.check_agents:
            known = EnvSettings(
                id=env.id,
                name=env.label,
                args=env.args,
                harness=env.harness,
                default_harness=config.orchestrator.train.harness,
            )
            algorithm = cls(settings_of(cls, ALGORITHM, algo.settings, where))
            algorithm.check_agents(env.label, find_agents(known))


def _check_source(
    where: str, cls: type[Algorithm], sampling: AlgoSamplingConfig, hooks: Hooks
) -> None:
    """Refuse a sampling source that the algorithm's component cannot train on."""
    source, component = sampling.source, cls.action_loss
    if sampling.client != "tokens" and not isinstance(source, FrozenModel):
        raise ConfigError(
            f"{where}: sampling.client = {sampling.client!r} applies to a frozen model, and "
            "sampling.source is none. Leave it out."
        )
    if source == "policy" and cls.needs_frozen_source:
        raise ConfigError(
            f"{where} imitates its source, and sampling.source is 'policy': training on the "
            "policy's own tokens would teach it nothing. Set sampling.source to a frozen model "
            '(name and base_url) or to a source of demonstrations ({ type = "dataset", ... }).'
        )
    if isinstance(source, FrozenModel) and component != "ce":
        raise ConfigError(
            f"{where} trains the {component} component, whose importance ratio needs the policy's "
            f"own sampling logprobs, and sampling.source is the frozen model {source.name!r}. "
            "Leave sampling.source at 'policy', or use an algorithm that feeds ce, such as sft."
        )
    if isinstance(source, SourceTable):
        offered = select(SOURCE, source.type, collect(hooks, SOURCE), f"{where}: sampling.source")
        settings_of(offered, SOURCE, source.settings, f"{where}: sampling.source")
        if cls.needs_frozen_source and offered.from_policy:
            raise ConfigError(
                f"{where} imitates its source, and source {source.type!r} gives rollouts of the "
                "policy itself. Use a source of demonstrations or a frozen model."
            )
        if component not in offered.feeds:
            raise ConfigError(
                f"{where} trains the {component} component, and source {source.type!r} can feed "
                f"{', '.join(sorted(offered.feeds))} only: its tokens were not sampled from "
                "the policy. Use an algorithm that feeds ce, such as sft, or another source."
            )


def _check_temperature(where: str, cls: type[Algorithm], env: EnvConfig, config: RunConfig) -> None:
    wanted = cls.needs_temperature
    found = (env.sampling or config.orchestrator.train.sampling).temperature
    if wanted is not None and found != wanted:
        raise ConfigError(
            f"{where} can learn at a sampling temperature of {wanted:g} only, got {found:g}. Set "
            "orchestrator.train.sampling.temperature, or the env's own."
        )


def _check_unsampled(where: str, env: EnvConfig) -> None:
    """An env with a source samples nothing, so these keys would have no effect."""
    for key in ("group_size", "sampling", "max_turns", "harness"):
        if getattr(env, key) is not None:
            raise ConfigError(
                f"{where}: {key} is set, and this env samples nothing: its rollouts come from "
                "sampling.source. Leave it out."
            )


def _check_group_size(config: RunConfig, env: EnvConfig, cls: type[Algorithm]) -> None:
    size = env.group_size or config.orchestrator.group_size
    if cls.group_relative and size == 1:
        raise ConfigError(
            f"env {env.label!r}: algorithm {cls.name!r} credits a rollout relative to its "
            "siblings, so with group_size = 1 every advantage is zero and nothing is learned. Set "
            "group_size to 2 or more."
        )


def _check_filters(config: RunConfig, hooks: Hooks) -> None:
    for name in ("pre_batch_filters", "post_batch_filters"):
        slot: tuple[FilterConfig, ...] = getattr(config.orchestrator, name)
        _check_slot(f"orchestrator.{name}", slot, collect(hooks, FILTER))


def _check_slot(
    where: str, slot: Sequence[FilterConfig], offers: dict[str, Offered[Filter]]
) -> None:
    counts = Counter(filter.type for filter in slot)
    for filter in slot:
        if counts[filter.type] > 1:
            raise ConfigError(
                f"{where}: filter {filter.type!r} is listed {counts[filter.type]} times"
            )
        cls = select(FILTER, filter.type, offers, where)
        settings_of(cls, FILTER, filter.settings, where)


def _check(
    kind: Kind[Any],
    name: str,
    settings: Mapping[str, Any],
    hooks: Hooks,
    where: str | None = None,
) -> None:
    place = where or kind.key
    cls = select(kind, name, collect(hooks, kind), place)
    settings_of(cls, kind, settings, place)
